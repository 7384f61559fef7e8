"""How long one training step takes on a placement: formulas, constants and their fit to measured steps; pure."""
