"""Who is alive: heartbeats of launchers and agents, probes of nodes, and the watchdog's client.

Other packages import: `heartbeats`, `probe`, `watchdog_client`.
"""
