"""Where small files come from: folders, fsspec URLs, packed homes, and how much may be asked of them.

Other packages import: `home`, `opening`, `selection`, `source`, `spool`, `tables`.
"""
