"""Joins cache and scheduler: submitting near the data, packing onto nodes, inventory, calibration.

Other packages import: `calibration`, `inventory`, `pack_target`, `packing`, `removal`, `submit`,
`topology_reading`, `waiting_jobs`.
"""
