"""Evidence to verdict to next step, shared by launcher, watchdog and `deeplink requeue`; pure.

Other packages import: `evidence`, `incident_merging`, `judge`, `node_rules`, `rank_failure`,
`records`, `recovery_steps`, `relaunch`, `witnesses`.
"""
