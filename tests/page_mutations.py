"""Faults of the page kernels for `mutation_check.py`: by file and suite, what replaces what."""

PAGE_ATTENTION = ("tests/kernels/test_page_attention.py", "-k", "interpreted")
PAGE_GRADIENTS = (
    "tests/kernels/test_page_gradients.py",
    "tests/kernels/test_page_attention.py",
    "-k",
    "interpreted or definition",
)
PAGE_WORKSPACE = ("tests/kernels/test_page_workspace.py",)
FLOAT8 = ("tests/kernels/test_page_float8.py", "-k", "interpreted or test_kernel or edges")
PAGE_MASS = ("tests/kernels/test_page_select.py", "-k", "mass and interpreted or far_below and interpreted")
PAGE_INDEX = ("tests/kernels/test_page_index.py", "-k", "interpreted or public")
PAGE_FAULTS = {
    ("page_forward.py", PAGE_ATTENTION): {
        "forward: padding of a list attended to": (
            "    num_steps = tl.load(counts + list_number) * (P // BLOCK_N)",
            "    num_steps = list_room * (P // BLOCK_N)",
        ),
        "forward: every row tile takes its own list": (
            "    block = first // Q_BLOCK",
            "    block = tl.minimum(tl.program_id(1), num_blocks - 1)",
        ),
        "forward: first rows of a page again and again": ("((step + 1) % SUBS) * BLOCK_N", "0"),
        "forward: second page of a list skipped": ("tl.load(list_at + 1 // SUBS,", "tl.load(list_at + 2 // SUBS,"),
        "forward: pages of a list behind the second skipped": (
            "        slot = tl.load(list_at + (step + 2) // SUBS, mask=step + 2 < num_steps, other=0)",
            "        pass",
        ),
        "forward: sums not rescaled when scores grow": ("            total *= rescale", "            pass"),
        "forward: output not rescaled when scores grow": ("            acc *= rescale[:, None]", "            pass"),
        "forward: weights that overflow beside the others kept": ("0, 1), 0) == 1:", "0, 1), 0) == 2:"),
        "forward: LSE in base 2": ("(top + tl.log2(safe)) * 0.6931471805599453", "top + tl.log2(safe)"),
    },
    ("page_dq.py", PAGE_GRADIENTS): {
        "dQ: what other keys contribute dropped": (
            "        acc += tl.load(other_at",
            "        acc += 0 * tl.load(other_at",
        ),
        "dQ: every row tile takes its own list": (
            "num_blocks + first // Q_BLOCK",
            "num_blocks + tl.minimum(tl.program_id(1), num_blocks - 1)",
        ),
        "dQ: derivative of the soft cap missing": (
            "        ds = p * (dp - row_delta[:, None])\n        if SOFTCAP:",
            "        ds = p * (dp - row_delta[:, None])\n        if False:",
        ),
        "dQ: dS of the first query head for all": (" * GROUP + first_head) * P", " * GROUP) * P"),
        "dQ: dS of the first rows of a block for all": (
            "_load_ds(ds_tiles, ds_at, first % Q_BLOCK, True,",
            "_load_ds(ds_tiles, ds_at, 0, True,",
        ),
        "dQ: dS times the first page of a list": (
            "        slot = tl.load(list_at + (step + 1) // SUBS, mask=step + 1 < num_steps, other=0)",
            "        pass",
        ),
    },
    ("page_dkv.py", PAGE_GRADIENTS): {
        "dK: derivative of the soft cap missing": (
            "ds = p * (dp - row_delta[None, :])\n            if SOFTCAP:",
            "ds = p * (dp - row_delta[None, :])\n            if False:",
        ),
        "dK: scale missing": ("        dk *= scale", "        pass"),
        "dK, dV: one query head of a group only": ("head = group * GROUP + lane_head", "head = group * GROUP"),
        "dK, dV: a unit runs into the next one": (
            "tl.minimum(count - number * max_blocks, max_blocks) * STEPS",
            "(count - number * max_blocks) * STEPS",
        ),
        "dK, dV: first visit of a unit again and again": (
            "            visit = tl.load(visits_at + (step + 1) // STEPS, mask=step + 1 < num_steps, other=0)",
            "            pass",
        ),
        "dK, dV: units of a cut page overwrite each other": ("// max_blocks + number", "// max_blocks"),
        "dK, dV: first unit of a cut page left out": (
            "        for _ in range(num_units):",
            "        for _ in range(1, num_units):",
        ),
        "dK, dV: cut pages added up in every turn": (
            "tl.load(cut_ends + first_key, mask=first_key > 0, other=0)",
            "0",
        ),
        "dK, dV: pages of all KV heads in the first turn": (
            "tl.load(ends + end_key - 1)",
            "tl.load(ends + num_keys - 1)",
        ),
        "dK: what lies in the record is lost": (
            "    dk += tl.load(record + tile, mask=inside, other=0.0).to(tl.float32)",
            "    dk += 0.0",
        ),
        "dK: rounded to nearest": ("round_to_bfloat16(dk, draw & 0xFFFF)", "round_to_bfloat16(dk, draw * 0 + 0x8000)"),
        "dK, dV: all pages rounded by the same bits": ("key * (P * D) + tile", "key * 0 + tile"),
        "before Hopper: rows behind the last token read": (
            "mask=(row < num_tokens)[:, None] & (",
            "mask=(row > -1)[:, None] & (",
        ),
        "before Hopper: dS of all rows of a block in one place": (
            "* Q_BLOCK + first\n        tl.store",
            "* Q_BLOCK\n        tl.store",
        ),
        "dS: of all heads in one place": (" * GROUP + lane_head) * P + first_row", " * GROUP) * P + first_row"),
        "dS: not kept for the first KV head of a turn": ("(group - first_group) * num_blocks", "group * num_blocks"),
        "dS: in the order of the pages' lists": ("(visit & 0xFFFF)", "0"),
    },
    ("page_backward.py", PAGE_GRADIENTS): {
        "page gradients: the definition overwrites": (
            "[None], first=False, seed=seed)",
            "[None], first=True, seed=seed)",
        ),
        "rows: delta of the output alone": (
            "product *= tl.load(out_at, mask=inside, other=0.0).to(tl.float32)",
            "product += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)",
        ),
    },
    ("page_backward.py", PAGE_WORKSPACE): {
        "workspace: too small for a turn": (
            "return min(num_groups, _DS_BYTES // max(head_bytes, 1))",
            "return num_groups",
        ),
        "workspace: partial sums forgotten": (" + 4 * num_partials * record_elements", ""),
    },
    ("page_forward.py", FLOAT8): {
        "forward: V in 8 bits with the scale of K": ("scale_at + 1, SCALED", "scale_at, SCALED"),
        "forward: 8 bits with the scales of the first page": ("tl.minimum(step + 1, num_steps - 1)", "0"),
    },
    ("page_dq.py", FLOAT8): {
        "dQ: V in 8 bits with the scale of K": (
            "record_row + P, scale_at + 1, SCALED",
            "record_row + P, scale_at, SCALED",
        ),
        "dQ: K in 8 bits with the scale of the first page": (
            "page_scale = tl.load(scales_at + 2 * ((step + 1) // SUBS), mask=step + 1 < num_steps, other=0.0)",
            "            pass",
        ),
    },
    ("page_dkv.py", FLOAT8): {
        "dK, dV: V in 8 bits with the scale of K": ("scales + 2 * key + 1", "scales + 2 * key"),
    },
    ("page_float8.py", FLOAT8): {
        "8 bits: small numbers as if they were normal": ("magnitude < 0x3C800000", "magnitude < 0"),
        "8 bits: infinities hidden": ("tl.where(finite, exponent << 23, 0x7FC00000)", "(exponent << 23)"),
        "8 bits: a scale too small for numbers above 1.75 times a power of two": ("(top + 0x1FFFFF)", "(top + 0)"),
    },
    ("page_select.py", PAGE_MASS): {
        "mass: last parts of a document left out": ("range(2):  # whole tiles", "range(1):  # whole tiles"),
        "mass: parts that do not exist counted": (
            'tl.where(part[None, :] < num_parts, scores, float("-inf")) if MASKED else scores',
            "scores",
        ),
        "mass: rows that do not exist counted": ('tl.where(exists, top + tl.log2(total), float("inf"))', "top"),
        "mass: all parts in one split only": ("for split in range(1, tl.num_programs(1))", "for split in range(0)"),
        "mass: parts of neighbouring pages mixed": ("column // 8 % (PARTS // 2) * 2", "column // 8 % PARTS * 2"),
        "mass: share of the plain weight left out": ("weights * (weights + PLAIN)", "weights * weights"),
    },
    ("page_index.py", PAGE_INDEX): {
        "index: all but the first unit of a page lost": (
            "    num_units = (count + max_blocks - 1) // max_blocks\n    cut",
            "    num_units = tl.minimum((count + max_blocks - 1) // max_blocks, 1)\n    cut",
        ),
        "index: pages of two units not taken for cut ones": ("(num_units > 1)", "(num_units > 2)"),
        "index: too little room for partial sums": (
            "return 2 * num_entries // (max_blocks + 1)",
            "return num_entries // (max_blocks + 1)",
        ),
    },
}
