"""The file of an index, taken apart: how it is written, read without trust, searched and mended."""
