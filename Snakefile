# Entry point; the workflow itself is workflow/Snakefile. (Snakemake forgets the default target of an include.)
include: "workflow/Snakefile"


rule default:
    default_target: True
    input:
        rules.all.input,
    localrule: True
