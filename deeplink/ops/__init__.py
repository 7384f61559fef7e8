"""Joins cache and scheduler: submitting near the data, packing onto nodes, inventory.

Other packages import: `calibration`, `inventory`, `packing`, `submit`, `topology_reading`.
"""
