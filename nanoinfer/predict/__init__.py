"""What ``nanoinfer predict``, ``fit`` and ``gpus`` say, before anything runs."""
