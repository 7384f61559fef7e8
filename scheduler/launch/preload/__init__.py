"""What a preloaded process runs in the user's own Python before the user's code: this folder leads its PYTHONPATH.

Nothing of DeepLink can be imported there, and that Python may be older than ours.
"""
