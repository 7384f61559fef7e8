"""Evidence to verdict (pure) to action.

Other packages import: `watchdog`, `requeue`, `server`, `service`.
"""
