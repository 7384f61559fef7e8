"""Evidence to verdict (pure) to action.

Other packages import: `watchdog`, `observer`, `requeue`, `resubmit`, `server`, `service`.
"""
