"""How long one training step takes on a placement: formulas, constants and their fit to measured steps; pure.

Other packages import: `constants`, `job_profile`, `step`, `sweep`.
"""
