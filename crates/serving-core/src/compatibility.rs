//! Which nodes may exchange KV, and in which facts two nodes differ that may not (PROTOCOL rule 13).

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::NodeName;

/// Longer values are shown by their first characters: of a SHA-256 they are enough to tell two apart.
const SHOWN_WHOLE_CHARS_MAX: usize = 40;
const SHOWN_CHARS: usize = 16;

/// Equal exactly for nodes that may exchange KV. The engine computes it from all [`CompatibilityFacts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CompatibilityHash(pub [u8; 32]);

/// What decides the bytes of a node's KV. The hash over it decides; the facts say why two hashes differ.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompatibilityFacts {
    /// SHA-256 over the files that decide the model's numbers. What follows from these files alone (rope scaling, attention
    /// windows, caps, norms) needs no field of its own.
    pub weights_sha256: [u8; 32],
    pub tokenizer_sha256: [u8; 32],
    /// Backend, numeric definition and its version.
    pub numerics_id: String,
    pub kv_dtype: String,
    /// Tokens of a KV block.
    pub block_tokens: u32,
    pub layer_count: u32,
    pub kv_head_count: u32,
    pub head_dim: u32,
    pub vocab_size: u32,
    pub context_length: u32,
    pub rope_base: f32,
    pub rank_count: u32,
    pub protocol_version: u32,
}

/// What a node says of the KV that it computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compatibility {
    /// Decides alone.
    pub hash: CompatibilityHash,
    /// `None`: an earlier version of baton, which does not tell them.
    pub facts: Option<Box<CompatibilityFacts>>,
}

impl From<CompatibilityHash> for Compatibility {
    fn from(hash: CompatibilityHash) -> Self {
        Self { hash, facts: None }
    }
}

/// A fact in which two nodes differ.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Difference {
    field: &'static str,
    left: String,
    right: String,
}

impl CompatibilityFacts {
    fn differences(&self, other: &Self) -> Vec<Difference> {
        let compared = self.as_text().into_iter().zip(other.as_text());
        compared
            .filter(|((_, left), (_, right))| left != right)
            .map(|((field, left), (_, right))| Difference { field, left, right })
            .collect()
    }

    /// Every fact with its name. A new field does not compile before it is here.
    fn as_text(&self) -> [(&'static str, String); 13] {
        let Self {
            weights_sha256,
            tokenizer_sha256,
            numerics_id,
            kv_dtype,
            block_tokens,
            layer_count,
            kv_head_count,
            head_dim,
            vocab_size,
            context_length,
            rope_base,
            rank_count,
            protocol_version,
        } = self;
        let hex = |sha256: &[u8; 32]| sha256.iter().map(|byte| format!("{byte:02x}")).collect();
        [
            ("protocol_version", protocol_version.to_string()),
            ("block_tokens", block_tokens.to_string()),
            ("numerics_id", numerics_id.clone()),
            ("kv_dtype", kv_dtype.clone()),
            ("rank_count", rank_count.to_string()),
            ("weights_sha256", hex(weights_sha256)),
            ("tokenizer_sha256", hex(tokenizer_sha256)),
            ("layer_count", layer_count.to_string()),
            ("kv_head_count", kv_head_count.to_string()),
            ("head_dim", head_dim.to_string()),
            ("vocab_size", vocab_size.to_string()),
            ("context_length", context_length.to_string()),
            ("rope_base", rope_base.to_string()),
        ]
    }
}

/// Why two nodes may not exchange KV. Its text names every fact in which they differ, with both values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incompatibility {
    left: NodeName,
    right: NodeName,
    cause: Cause,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Cause {
    /// Empty: one of the two knows facts that the other does not.
    Differ(Vec<Difference>),
    NotTold {
        by: Vec<NodeName>,
    },
}

impl Incompatibility {
    /// `None`: the two may exchange KV.
    pub fn between(left: (&NodeName, &Compatibility), right: (&NodeName, &Compatibility)) -> Option<Self> {
        if left.1.hash == right.1.hash {
            return None;
        }
        let cause = match (&left.1.facts, &right.1.facts) {
            (Some(ours), Some(theirs)) => Cause::Differ(ours.differences(theirs)),
            _ => {
                let silent = [left, right].into_iter().filter(|(_, of)| of.facts.is_none());
                let by = silent.map(|(name, _)| name.clone()).collect();
                Cause::NotTold { by }
            }
        };
        Some(Self {
            left: left.0.clone(),
            right: right.0.clone(),
            cause,
        })
    }
}

impl fmt::Display for Incompatibility {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { left, right, cause } = self;
        match cause {
            Cause::Differ(differences) if !differences.is_empty() => {
                for (at, difference) in differences.iter().enumerate() {
                    let (ours, theirs) = (shown(&difference.left), shown(&difference.right));
                    let comma = if at == 0 { "" } else { ", " };
                    write!(
                        f,
                        "{comma}{} is {ours} on {left} and {theirs} on {right}",
                        difference.field
                    )?;
                }
                Ok(())
            }
            Cause::Differ(_) => write!(
                f,
                "the compatibility hashes of {left} and {right} differ, but no fact that both tell: their versions of baton differ"
            ),
            Cause::NotTold { by } => {
                let by: Vec<&str> = by.iter().map(NodeName::as_str).collect();
                let by = by.join(" and ");
                write!(
                    f,
                    "the compatibility hashes of {left} and {right} differ; facts not told by {by}, an earlier version of baton"
                )
            }
        }
    }
}

fn shown(value: &str) -> String {
    match value.chars().count() {
        0..=SHOWN_WHOLE_CHARS_MAX => value.to_owned(),
        _ => value.chars().take(SHOWN_CHARS).chain("..".chars()).collect(),
    }
}

#[cfg(test)]
pub(crate) mod test_kit {
    use super::CompatibilityFacts;

    pub(crate) fn facts() -> CompatibilityFacts {
        CompatibilityFacts {
            weights_sha256: [1; 32],
            tokenizer_sha256: [2; 32],
            numerics_id: "cpu-int8/1".into(),
            kv_dtype: "f16".into(),
            block_tokens: 16,
            layer_count: 30,
            kv_head_count: 3,
            head_dim: 64,
            vocab_size: 49_152,
            context_length: 2_048,
            rope_base: 10_000.0,
            rank_count: 1,
            protocol_version: 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::test_kit::facts;
    use super::*;

    fn told(hash: u8, facts: Option<CompatibilityFacts>) -> Compatibility {
        Compatibility {
            hash: CompatibilityHash([hash; 32]),
            facts: facts.map(Box::new),
        }
    }

    fn between(left: &Compatibility, right: &Compatibility) -> Option<String> {
        let (p, d) = (NodeName::new("prefill-0"), NodeName::new("decode-0"));
        Incompatibility::between((&p, left), (&d, right)).map(|why| why.to_string())
    }

    #[test]
    fn each_fact_that_differs_is_named_with_both_values() {
        type Change = fn(&mut CompatibilityFacts);
        let changes: [(&str, Change, &str, &str); 13] = [
            (
                "weights_sha256",
                |f| f.weights_sha256[0] = 9,
                "0101010101010101..",
                "0901010101010101..",
            ),
            (
                "tokenizer_sha256",
                |f| f.tokenizer_sha256[1] = 9,
                "0202020202020202..",
                "0209020202020202..",
            ),
            (
                "numerics_id",
                |f| f.numerics_id = "cpu-exact/1".into(),
                "cpu-int8/1",
                "cpu-exact/1",
            ),
            ("kv_dtype", |f| f.kv_dtype = "f32".into(), "f16", "f32"),
            ("block_tokens", |f| f.block_tokens = 32, "16", "32"),
            ("layer_count", |f| f.layer_count = 31, "30", "31"),
            ("kv_head_count", |f| f.kv_head_count = 4, "3", "4"),
            ("head_dim", |f| f.head_dim = 65, "64", "65"),
            ("vocab_size", |f| f.vocab_size = 7, "49152", "7"),
            ("context_length", |f| f.context_length = 8, "2048", "8"),
            ("rope_base", |f| f.rope_base = 100_000.0, "10000", "100000"),
            ("rank_count", |f| f.rank_count = 2, "1", "2"),
            ("protocol_version", |f| f.protocol_version = 3, "2", "3"),
        ];
        let ours = facts();
        let mut all = facts();
        for (field, change, left, right) in changes {
            let mut theirs = facts();
            change(&mut theirs);
            change(&mut all);
            let found = ours.differences(&theirs);
            assert_eq!(found.len(), 1, "{field}: {found:?}");
            assert_eq!(
                between(&told(1, Some(ours.clone())), &told(2, Some(theirs))),
                Some(format!("{field} is {left} on prefill-0 and {right} on decode-0"))
            );
        }
        assert_eq!(ours.differences(&all).len(), 13);
        assert_eq!(ours.differences(&facts()), []);
    }

    #[test]
    fn a_difference_at_the_end_of_a_long_value_counts() {
        let mut theirs = facts();
        theirs.weights_sha256[31] = 9;
        assert_eq!(facts().differences(&theirs).len(), 1);
    }

    #[test]
    fn the_hash_alone_decides() {
        let other = CompatibilityFacts {
            block_tokens: 32,
            ..facts()
        };
        assert_eq!(between(&told(1, Some(facts())), &told(1, Some(other))), None);
        assert_eq!(between(&told(1, None), &told(1, Some(facts()))), None);
        let unexplained = between(&told(1, Some(facts())), &told(2, Some(facts()))).expect("hashes differ");
        assert!(unexplained.contains("versions of baton differ"), "{unexplained}");
    }

    #[test]
    fn a_node_that_tells_no_facts_is_named() {
        let silent = between(&told(1, Some(facts())), &told(2, None)).expect("hashes differ");
        assert!(silent.contains("facts not told by decode-0,"), "{silent}");
        let both = between(&told(1, None), &told(2, None)).expect("hashes differ");
        assert!(both.contains("facts not told by prefill-0 and decode-0,"), "{both}");
    }
}
