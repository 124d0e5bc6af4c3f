//! How the families of byte-level BPE cut a text into words: the names of `tokenizer.ggml.pre`, and what each stands for.
//!
//! The patterns are those of the families' own tokenizer.json. The names and their groups are llama.cpp's
//! (`llama-vocab.cpp`).

use super::error::TokenizerError;
use super::normalizer::{Step, UnicodeForm};
use super::words::{Behavior, GPT2, Split};

/// What a name of `tokenizer.ggml.pre` stands for.
#[derive(Debug)]
pub(super) struct Family {
    names: &'static [&'static str],
    /// Each cuts the words of the one before it, and its matches are words.
    patterns: &'static [&'static str],
    /// A word that is a token is that token, whatever the merges say.
    pub(super) ignores_merges: bool,
    /// The begin token is added where the file does not say so.
    pub(super) adds_begin: bool,
    composes: bool,
}

impl Family {
    const fn new(names: &'static [&'static str], patterns: &'static [&'static str]) -> Self {
        Family {
            names,
            patterns,
            ignores_merges: false,
            adds_begin: false,
            composes: false,
        }
    }
}

const DIGIT: &str = r"\p{N}";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

const FAMILIES: &[Family] = &[
    Family::new(
        &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
        ],
        &[DIGIT, GPT2],
    ),
    Family::new(
        &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "exaone4",
            "trillion",
            "granite-docling",
        ],
        &[GPT2],
    ),
    Family {
        ignores_merges: true,
        adds_begin: true,
        ..Family::new(
            &[
                "llama-bpe",
                "llama3",
                "llama-v3",
                "falcon3",
                "falcon-h1",
                "pixtral",
                "midm-2.0",
                "lfm2",
            ],
            &[LLAMA3],
        )
    },
    Family::new(&["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], &[LLAMA3]),
    Family {
        composes: true,
        ..Family::new(&["qwen2"], &[QWEN2])
    },
    Family::new(&["deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"], &[QWEN2]),
    Family {
        ignores_merges: true,
        adds_begin: true,
        ..Family::new(&["tekken"], &[TEKKEN])
    },
    Family::new(&["gpt-4o", "llama4", "kanana2"], &[GPT4O]),
    Family::new(&["deepseek-v3"], &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3]),
    Family::new(
        &["deepseek-coder"],
        &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT],
    ),
];

pub(super) fn find(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.names.contains(&name))
}

/// All names, for the text of a refusal.
pub(super) fn names() -> String {
    let names: Vec<_> = FAMILIES.iter().flat_map(|family| family.names).copied().collect();
    names.join(", ")
}

impl Family {
    pub(super) fn words(&self) -> Result<Vec<Split>, TokenizerError> {
        let split = |pattern: &&str| Split::pattern(pattern, Behavior::Isolated, false);
        self.patterns.iter().map(split).collect()
    }

    /// Qwen's tokenizer.json composes characters (NFC). GGUF files do not say so, and llama.cpp leaves it out.
    pub(super) fn normalizer(&self) -> Vec<Step> {
        let compose = self.composes.then_some(Step::Unicode(UnicodeForm::Nfc));
        compose.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_compiles_and_every_name_is_there_once() {
        let mut names: Vec<_> = FAMILIES.iter().flat_map(|family| family.names).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        for family in FAMILIES {
            assert_eq!(family.words().unwrap().len(), family.patterns.len());
        }
        assert!(find("llama-bpe").is_some_and(|family| family.ignores_merges && family.adds_begin));
        assert!(find("qwen2").is_some_and(|family| !family.normalizer().is_empty()));
        assert!(find("default").is_none() && find("").is_none());
    }
}
