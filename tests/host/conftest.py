from hypothesis import settings

# Machines shared with other work are too uneven for a time limit per example.
settings.register_profile("host", deadline=None)
settings.load_profile("host")
