"""The base of every other package: errors, types, the clock, settings, metrics, files that appear whole.

Other packages import: `admission`, `clock`, `codec`, `config`, `descriptors`, `errors`, `finding`, `metrics`,
`mounts`, `plainpickle`, `private`, `process_metrics`, `publish`, `tcp`, `text`, `timeouts`, `types`.
"""
