"""Evidence to verdict (pure) to action.

Other packages import: `watchdog`, `requeue`, `service`, `caller_tokens`, `operator_client`, `operator_requests`.
"""
