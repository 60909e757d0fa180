from hypothesis import settings

# Machines are busy at times: what is tested is values, not how long they take.
settings.register_profile("gym_compress", deadline=None)
settings.load_profile("gym_compress")
