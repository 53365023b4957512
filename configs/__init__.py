"""Presets to copy: recipes, Accelerate and DeepSpeed configurations.

The folder lies at the top of the repository, where people look for it, and is installed as the package
``oomb_accel.configs``, so ``importlib.resources.files("oomb_accel.configs")`` finds the files anywhere.
"""
