"""A folder for PYTHONPATH: Python runs the `sitecustomize` in it before any script."""
