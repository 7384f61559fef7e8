"""Joins cache and scheduler: submitting near the data, packing onto nodes, inventory, calibration.

Other packages import: `calibration`, `inventory`, `packing`, `submit`, `topology_reading`.
"""
