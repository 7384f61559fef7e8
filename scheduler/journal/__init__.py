"""What the watchdog keeps for ever: incidents, evidence and actions, in one SQLite file.

Other packages import: `incident_json`, `journal`, `operations`, `standby`.
"""
