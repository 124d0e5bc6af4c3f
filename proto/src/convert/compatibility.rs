//! The compatibility of a node: its hash, and the facts under it. Earlier versions send the hash alone.

use serving_core::compatibility::{Compatibility, CompatibilityFacts, CompatibilityHash};

use super::{Result, finite, hash32, name};
use crate::v1;

/// The fields of the two forms.
pub(super) fn to_wire(compatibility: Compatibility) -> (Vec<u8>, Option<v1::CompatibilityFacts>) {
    let facts = compatibility
        .facts
        .map(|facts| *facts)
        .map(|facts| v1::CompatibilityFacts {
            weights_sha256: facts.weights_sha256.to_vec(),
            tokenizer_sha256: facts.tokenizer_sha256.to_vec(),
            numerics_id: facts.numerics_id,
            kv_dtype: facts.kv_dtype,
            block_tokens: facts.block_tokens,
            layer_count: facts.layer_count,
            kv_head_count: facts.kv_head_count,
            head_dim: facts.head_dim,
            vocab_size: facts.vocab_size,
            context_length: facts.context_length,
            rope_base: facts.rope_base,
            rank_count: facts.rank_count,
            protocol_version: facts.protocol_version,
        });
    (compatibility.hash.0.to_vec(), facts)
}

/// `field` is that of the hash.
pub(super) fn from_wire(
    (hash, facts): (&[u8], Option<v1::CompatibilityFacts>),
    field: &'static str,
) -> Result<Compatibility> {
    Ok(Compatibility {
        hash: CompatibilityHash(hash32(hash, field)?),
        facts: facts.map(facts_from_wire).transpose()?.map(Box::new),
    })
}

fn facts_from_wire(wire: v1::CompatibilityFacts) -> Result<CompatibilityFacts> {
    Ok(CompatibilityFacts {
        weights_sha256: hash32(&wire.weights_sha256, "compatibility_facts.weights_sha256")?,
        tokenizer_sha256: hash32(&wire.tokenizer_sha256, "compatibility_facts.tokenizer_sha256")?,
        numerics_id: name(wire.numerics_id, "compatibility_facts.numerics_id")?,
        kv_dtype: name(wire.kv_dtype, "compatibility_facts.kv_dtype")?,
        block_tokens: wire.block_tokens,
        layer_count: wire.layer_count,
        kv_head_count: wire.kv_head_count,
        head_dim: wire.head_dim,
        vocab_size: wire.vocab_size,
        context_length: wire.context_length,
        rope_base: finite(wire.rope_base, "compatibility_facts.rope_base")?,
        rank_count: wire.rank_count,
        protocol_version: wire.protocol_version,
    })
}
