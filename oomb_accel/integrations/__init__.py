"""Where oomb_accel meets other libraries: transformers first of all."""
