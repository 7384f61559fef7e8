"""Evidence to verdict (pure) to action.

Other packages import: `watchdog`, `requeue`, `service`, `authorizer`, `operator_requests`.
"""
