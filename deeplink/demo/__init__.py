"""The whole main job told as a story: `make demo`."""
