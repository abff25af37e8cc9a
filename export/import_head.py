"""Bring a public draft head into runs/NAME, to export, convert and evaluate it like one trained here.

    python export/import_head.py [RECIPE] [section.key=value ...] --head PATH_OR_HUB_ID [--revision REVISION]
                                 [--layer-ids-are boundaries|blocks]

The recipe names the target and must describe the head, `head.type` first; if it does not, the error lists the
overrides that do. A `head.sliding_window` of its own is the head's from then on.
safetensors only. Then: python export/head.py RECIPE, python eval/head.py RECIPE; or, imported under another name
(name=OTHER), accelerate launch train/eagle3.py RECIPE train.init_from=runs/OTHER.
"""

from drafthead.cli import recipe_from_command_line, run_recipe


def main() -> None:
    recipe, args = recipe_from_command_line(
        __doc__,
        ("--head", {"required": True, "help": "a directory or a hub id"}),
        ("--revision", {"help": "of a hub id"}),
        (
            "--layer-ids-are",
            {"choices": ["boundaries", "blocks"], "help": "how config.json counts aux layers, if in doubt"},
        ),
    )
    from drafthead.exporting.importing import import_head

    import_head(recipe, args.head, args.revision, args.layer_ids_are)


if __name__ == "__main__":
    run_recipe(main)
