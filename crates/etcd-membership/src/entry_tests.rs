//! The record's format is fixed by a golden text, and each damage is refused by its kind.

use serving_core::compatibility::{Compatibility, CompatibilityFacts, CompatibilityHash};

use super::*;

pub(crate) fn coordinator(name: &str, epoch: u64) -> CoordinatorEntry {
    CoordinatorEntry {
        id: NodeId {
            name: NodeName::new(name),
            epoch: NodeEpoch(epoch),
        },
        control_address: "10.0.0.1:7000".into(),
        http_address: "10.0.0.1:8000".into(),
        version: "0.1.0".into(),
        state: NodeState::Ready,
    }
}

fn node() -> NodeRecord {
    NodeRecord {
        id: NodeId {
            name: NodeName::new("decode-0"),
            epoch: NodeEpoch(u64::MAX - 1),
        },
        role: NodeRole::Decode,
        is_co_located: true,
        address: "10.0.0.2:7100".into(),
        kv_address: "10.1.0.2:7200".into(),
        compatibility: Compatibility {
            hash: CompatibilityHash([0xa5; 32]),
            facts: Some(Box::new(CompatibilityFacts {
                weights_sha256: [0xb6; 32],
                tokenizer_sha256: [0xc7; 32],
                numerics_id: "cpu-int8-blocks/1".into(),
                kv_dtype: "f16".into(),
                block_tokens: 16,
                layer_count: 30,
                kv_head_count: 3,
                head_dim: 64,
                vocab_size: 49_152,
                context_length: 8_192,
                rope_base: 100_000.5,
                rank_count: 1,
                protocol_version: 2,
            })),
        },
        transports: vec!["shm".into(), "grpc".into()],
        version: "0.1.0".into(),
        capacity: NodeCapacity {
            kv_blocks: 1,
            block_tokens: 16,
            max_sequences: 3,
            max_batch_tokens: 4,
            max_model_tokens: 5,
            block_bytes: u64::MAX,
        },
        model_name: "smollm2-135m".into(),
        state: NodeState::Draining,
        roles: Vec::new(),
    }
}

/// Processes of two versions meet in etcd: a change here is a change of the schema.
#[test]
fn the_format_is_fixed() {
    let json = NodeEntry::from(node()).encode().expect("encodes");
    let hash = "a5".repeat(32);
    let facts = format!(
        r#"{{"weights_sha256":"{}","tokenizer_sha256":"{}","numerics_id":"cpu-int8-blocks/1","kv_dtype":"f16","block_tokens":16,"layer_count":30,"kv_head_count":3,"head_dim":64,"vocab_size":49152,"context_length":8192,"rope_base":100000.5,"rank_count":1,"protocol_version":2}}"#,
        "b6".repeat(32),
        "c7".repeat(32)
    );
    let expected = format!(
        r#"{{"schema":1,"name":"decode-0","epoch":"fffffffffffffffe","role":"decode","is_co_located":true,"address":"10.0.0.2:7100","kv_address":"10.1.0.2:7200","compatibility":"{hash}","compatibility_facts":{facts},"transports":["shm","grpc"],"version":"0.1.0","capacity":{{"kv_blocks":1,"block_tokens":16,"max_sequences":3,"max_batch_tokens":4,"max_model_tokens":5,"block_bytes":18446744073709551615}},"model_name":"smollm2-135m","state":"draining"}}"#
    );
    assert_eq!(String::from_utf8_lossy(&json), expected);
    assert_eq!(NodeEntry::decode(&json).map(NodeRecord::from), Ok(node()));
    // As earlier versions write it, who do not tell the facts.
    let earlier = expected.replace(&format!(r#""compatibility_facts":{facts},"#), "");
    let mut record = node();
    record.compatibility.facts = None;
    assert_eq!(NodeEntry::decode(earlier.as_bytes()).map(NodeRecord::from), Ok(record));
    let damaged = expected.replace(&"b6".repeat(32), "b6");
    let field = "compatibility_facts.weights_sha256";
    assert!(
        matches!(NodeEntry::decode(damaged.as_bytes()), Err(BadRecord::Invalid { field: of, .. }) if of == field),
        "{damaged}"
    );
    let entry = coordinator("coordinator-0", 7);
    let json = entry.encode().expect("encodes");
    let expected = r#"{"schema":1,"name":"coordinator-0","epoch":"0000000000000007","control_address":"10.0.0.1:7000","http_address":"10.0.0.1:8000","version":"0.1.0","state":"ready"}"#;
    assert_eq!(String::from_utf8_lossy(&json), expected);
    assert_eq!(CoordinatorEntry::decode(&json), Ok(entry));
}

fn edited(from: &str, to: &str) -> Result<CoordinatorEntry, BadRecord> {
    let json = coordinator("c", 7).encode().expect("encodes");
    let text = String::from_utf8(json).expect("text").replacen(from, to, 1);
    decode_at(b"c", text.as_bytes())
}

#[test]
fn a_newer_version_may_add_fields_but_not_change_the_schema() {
    assert!(edited("\"version\"", "\"zone\":{\"a\":[1]},\"version\"").is_ok());
    assert_eq!(
        edited("\"schema\":1", "\"schema\":2"),
        Err(BadRecord::UnknownSchema { got: 2 })
    );
    let newer = br#"{"schema":9,"epoch":"0000000000000007","all":"else"}"#;
    assert_eq!(epoch_of(newer), Some(NodeEpoch(7)));
}

#[test]
fn bad_records_are_refused_by_kind() {
    let is_shape = |result| matches!(result, Err(BadRecord::Shape { .. }));
    assert!(is_shape(edited("{", "")));
    assert!(is_shape(edited("\"schema\":1,", "")));
    assert!(is_shape(edited("\"schema\":1", "\"schema\":-1")));
    assert!(is_shape(edited("\"version\":\"0.1.0\",", "")));
    let is_invalid = |result, name: &str| matches!(result, Err(BadRecord::Invalid { field, .. }) if field == name);
    assert!(is_invalid(edited("0000000000000007", "+000000000000007"), "epoch"));
    assert!(is_invalid(edited("ready", "lost"), "state"));
    assert!(is_invalid(edited("10.0.0.1:7000", "a\\nb"), "control_address"));
    assert!(is_invalid(edited("10.0.0.1:7000", ""), "control_address"));
    assert!(is_invalid(edited("\"c\"", "\"a/b\""), "name"));
    let other = BadRecord::NameDiffers {
        key: "c".into(),
        name: "d".into(),
    };
    assert_eq!(edited("\"c\"", "\"d\""), Err(other));
    let huge = vec![b' '; RECORD_BYTES_MAX + 1];
    assert_eq!(CoordinatorEntry::decode(&huge), Err(BadRecord::TooLarge));
    assert_eq!(epoch_of(&huge), None);
}

#[test]
fn a_process_hears_that_its_own_record_is_bad() {
    let slash = coordinator("a/b", 1).encode();
    assert!(
        matches!(slash, Err(BadRecord::Invalid { field: "name", .. })),
        "{slash:?}"
    );
    let mut prefill = node();
    prefill.role = NodeRole::Prefill;
    assert!(NodeEntry::from(prefill).encode().is_err());
}
