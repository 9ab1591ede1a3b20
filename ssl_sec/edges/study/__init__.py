"""Studies: arms of one recipe, compared over seeds pair by pair."""
