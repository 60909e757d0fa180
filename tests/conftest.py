import os

from hypothesis import settings

# Small networks train slower on threads that wait for each other, most of all on a busy machine. Before PyTorch is
# imported, and for processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Machines are busy at times: what is tested is values, not how long they take.
settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.load_profile("quick")  # pytest --hypothesis-profile=thorough takes the other one
