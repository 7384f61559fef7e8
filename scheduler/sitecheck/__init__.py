"""Is this site fit for the first job? Evidence is gathered, rules judge it, findings say what is to be changed.

Other packages import: `doctor_checks`, `examine`, `part`.
"""
