"""From files, folders and hub datasets to token ids on disk, and from there to documents and batches.

Empty, as the processes that tokenise import :mod:`oomb_accel.data.worker`, and should not have to wait for torch.
"""
