"""Joins cache and scheduler: submitting near the data, packing onto nodes, inventory, calibration.

Other packages import: `calibration`, `inventory`, `pack_target`, `packed_home`, `submit`, `topology_reading`,
`waiting_jobs`.
"""
