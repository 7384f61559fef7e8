"""The rules of a verdict, one module for each thing that can be wrong. Pure; `judge` has the order of thought."""
