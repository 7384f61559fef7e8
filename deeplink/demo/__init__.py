"""The whole main job told as a story: `make demo`.

Other packages import: `stage`, `story`.
"""
