"""What the prediction of a step knows of machines and of a job, and how the first is measured; pure.

Other packages import: `constants`, `job_profile`.
"""
