"""Starting and supervising a job's agents and ranks inside one allocation.

Other packages import: `agent_monitor`, `agent_pool`, `backend`, `container`, `environment`, `job`,
`launcher_process`, `launcher_role`, `launch_spec`, `local_backend`, `shared_network`, `process`, `slurm_backend`,
`srun`, `srun_shim`.
"""
