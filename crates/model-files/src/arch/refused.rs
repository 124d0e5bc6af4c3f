//! Architectures that this build does not run, and what they are: a refusal then says more than a name.

const EXPERTS: &str = "a mixture of experts";
const STATE: &str = "a model with a recurrent state";
const NO_TEXT: &str = "no model that generates text from left to right";

/// Names in GGUF files and in folders, in the order in which they are tried. Each stands for all names that contain it.
const KINDS: &[(&str, &str)] = &[
    ("deepseek", "a mixture of experts with multi-head latent attention"),
    ("kimi", "a mixture of experts with multi-head latent attention"),
    ("qwen3next", "a mixture of experts with a recurrent state"),
    ("qwen3_next", "a mixture of experts with a recurrent state"),
    ("jamba", "a mixture of experts with a recurrent state"),
    ("moe", EXPERTS),
    ("mixtral", EXPERTS),
    ("grok", EXPERTS),
    ("dbrx", EXPERTS),
    ("arctic", EXPERTS),
    ("llama4", EXPERTS),
    ("gpt-oss", EXPERTS),
    ("gpt_oss", EXPERTS),
    ("mamba", STATE),
    ("rwkv", STATE),
    ("zamba", STATE),
    ("hybrid", STATE),
    ("nemotron_h", STATE),
    ("lfm2", STATE),
    ("plamo2", STATE),
    ("recurrent", STATE),
    ("bert", NO_TEXT),
    ("t5", NO_TEXT),
    ("clip", NO_TEXT),
    ("whisper", NO_TEXT),
    ("llava", "a model that reads images"),
    ("mllama", "a model that reads images"),
    ("vl", "a model that reads images"),
];

/// ` (what it is)`, or nothing for a name that we do not know.
pub(crate) fn what_it_is(name: &str) -> String {
    let known = KINDS.iter().find(|(part, _)| name.contains(part));
    known.map_or_else(String::new, |(_, kind)| format!(" ({kind})"))
}
