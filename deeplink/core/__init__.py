"""The base of every other package: errors, types, the clock, settings, metrics, files that appear whole.

Other packages import: `admission`, `clock`, `codec`, `config`, `descriptors`, `errors`, `finding`, `metrics`,
`metrics_server`, `plainpickle`, `prctl`, `private`, `process_identity`, `process_metrics`, `publish`,
`ranged_file`, `store_place`, `tcp`, `text`, `timeouts`, `types`.
"""
