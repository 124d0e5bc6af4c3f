//! Cuts of two public traces: their figures are those of an independent program, and damaged files are errors, never panics.

#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;
use workload::trace::facts::TraceFacts;
use workload::trace::scaling::{Scaling, StepSpread};
use workload::trace::{ReadLimits, Trace, TraceError, mooncake, own_format, read};

const FILES: [&str; 2] = [
    "mooncake/conversation_trace.head.jsonl",
    "azure2023/AzureLLMInferenceTrace_conv.head.csv",
];

fn bytes(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn trace(name: &str) -> Trace {
    let file = name.rsplit('/').next().unwrap_or(name);
    read(file, &mut &bytes(name)[..], &ReadLimits::default()).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// `expected` has a part of the keys. Numbers may differ by rounding.
#[track_caller]
fn assert_close(place: &str, found: &Value, expected: &Value) {
    match (found, expected) {
        (Value::Object(found), Value::Object(expected)) => {
            for (key, value) in expected {
                assert_close(&format!("{place}.{key}"), &found[key], value);
            }
        }
        (Value::Number(found), Value::Number(expected)) => {
            let (found, expected) = (
                found.as_f64().unwrap_or(f64::NAN),
                expected.as_f64().unwrap_or(f64::NAN),
            );
            let difference = (found - expected).abs();
            assert!(
                difference <= 1e-9 * expected.abs(),
                "{place}: {found} is not {expected}"
            );
        }
        _ => assert_eq!(found, expected, "{place}"),
    }
}

#[test]
fn figures_are_those_of_an_independent_program() {
    let golden: Vec<Value> = serde_json::from_slice(&bytes("facts.json")).expect("facts.json is a list");
    assert_eq!(golden.len(), FILES.len());
    for (name, expected) in FILES.iter().zip(&golden) {
        let facts = serde_json::to_value(TraceFacts::of(&trace(name))).expect("facts are JSON");
        assert_close(name, &facts, expected);
    }
}

#[test]
fn a_trace_keeps_its_requests_and_its_hash_in_our_format() {
    for name in FILES {
        let trace = trace(name);
        let text = own_format::write(&trace);
        let again = read("other", &mut text.as_bytes(), &ReadLimits::default()).expect("it was just written");
        assert_eq!(trace, again);
        let renamed = Trace {
            name: "other".to_owned(),
            ..again
        };
        assert_eq!(own_format::hash(&trace), own_format::hash(&renamed));
        let mut changed = renamed;
        changed.requests[100].output_tokens += 1;
        assert_ne!(own_format::hash(&trace), own_format::hash(&changed));
    }
}

/// The hash is in reports: a change of this value makes earlier reports incomparable.
#[test]
fn hashes_and_spread_times_stay() {
    let spread = Scaling {
        length_divisor: 32,
        spread: Some(StepSpread {
            step: mooncake::STEP,
            seed: 17,
        }),
        ..Scaling::default()
    };
    let mooncake = trace(FILES[0]);
    let scaled = spread.apply(&mooncake).expect("32 divides 512");
    let hashes = [mooncake, scaled.trace, trace(FILES[1])].map(|trace| own_format::hash(&trace)[..16].to_owned());
    assert_eq!(hashes, ["89be5d63137a0365", "1f3b3dcd6c38c6f1", "2fdbc4e3f977dbae"]);
}

/// A prefix cache finds the same share in the scaled trace, because the blocks are divided with the lengths.
#[test]
fn scaling_keeps_the_share_of_shared_prefixes() {
    let whole = trace(FILES[0]);
    let scaling = Scaling {
        length_divisor: 32,
        ..Scaling::default()
    };
    let scaled = scaling.apply(&whole).expect("32 divides 512").trace;
    let share = |trace: &Trace| {
        TraceFacts::of(trace)
            .prefixes
            .expect("Mooncake has prefixes")
            .hit_tokens
    };
    assert!((share(&whole) - share(&scaled)).abs() < 0.002);
}

#[test]
fn each_limit_is_kept() {
    let bytes = bytes(FILES[0]);
    let usual = ReadLimits::default();
    let refused = |limits: ReadLimits| read("t", &mut &bytes[..], &limits).expect_err("the limit is below the file");
    let rows = refused(ReadLimits { rows_max: 379, ..usual });
    assert!(matches!(rows, TraceError::TooManyRows { rows_max: 379 }));
    let line = refused(ReadLimits {
        line_bytes_max: 200,
        ..usual
    });
    assert!(matches!(line, TraceError::LineTooLong { .. }));
    let size = u64::try_from(bytes.len()).expect("a length fits");
    let whole = refused(ReadLimits {
        bytes_max: size - 1,
        ..usual
    });
    assert!(matches!(whole, TraceError::TooLarge { .. }));
    let exact = ReadLimits {
        rows_max: 380,
        bytes_max: size,
        ..usual
    };
    assert_eq!(
        read("t", &mut &bytes[..], &exact)
            .expect("exactly at the limits")
            .requests
            .len(),
        380
    );
}

/// Damages a few rows of `text`, as a broken disk or a careless script would.
fn damaged(text: &[u8], seed: u64) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut bytes = text.to_vec();
    for _ in 0..random.random_range(1..4) {
        // Two changes can leave nothing: a cut to one byte, and its removal.
        if bytes.is_empty() {
            break;
        }
        let at = random.random_range(0..bytes.len());
        match random.random_range(0..5) {
            0 => bytes[at] = random.random(),
            1 => bytes.truncate(at.max(1)),
            2 => bytes.insert(at, b"0123456789,\n\"{}[]:-e"[random.random_range(0..20)]),
            3 => {
                let part = bytes[at..(at + 40).min(bytes.len())].to_vec();
                bytes.splice(at..at, part);
            }
            _ => drop(bytes.remove(at)),
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// A damaged file is an error or another trace that keeps the rules of every trace; it is never a panic.
    #[test]
    fn a_damaged_file_never_panics(seed in any::<u64>(), which in 0_usize..3) {
        let whole = match which {
            2 => own_format::write(&trace(FILES[0])).into_bytes(),
            _ => bytes(FILES[which]),
        };
        let lines: Vec<&[u8]> = whole.split_inclusive(|byte| *byte == b'\n').take(12).collect();
        let bytes = damaged(&lines.concat(), seed);
        if let Ok(trace) = read("damaged", &mut &bytes[..], &ReadLimits::default()) {
            prop_assert!(!trace.requests.is_empty());
            prop_assert!(trace.requests.windows(2).all(|pair| pair[0].at <= pair[1].at));
            prop_assert!(trace.requests.iter().all(|request| request.prompt_tokens > 0 && request.output_tokens > 0));
            let _facts = TraceFacts::of(&trace);
        }
    }
}
