"""Packed samples as files: paths, the fsspec file system, copying out, mmengine's backend.

Other packages import: `copy_out`, `library`.
"""
