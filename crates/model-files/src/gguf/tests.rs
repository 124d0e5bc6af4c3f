//! The reader against the real file, against hand-built files and against damaged ones.

use rand::{Rng, SeedableRng, rngs::StdRng};

use super::*;
use crate::test_kit::{BuiltTensor, GgufBuilder, TinyModel, model_path};

/// Length of the real file's header (metadata and tensor table), for cuts and flips that matter.
const REAL_HEADER_BYTES: usize = 1_785_664;

fn parse(builder: &GgufBuilder) -> Result<Contents, GgufError> {
    Contents::parse(&builder.build())
}

fn one_tensor(tensor: BuiltTensor) -> GgufBuilder {
    GgufBuilder {
        tensors: vec![tensor],
        ..GgufBuilder::new()
    }
}

fn f32_tensor(name: &str) -> BuiltTensor {
    BuiltTensor {
        name: name.to_owned(),
        type_id: 0,
        dims: vec![8],
        bytes: vec![0; 32],
        offset: None,
    }
}

#[test]
fn real_file() {
    let path = model_path();
    let file = GgufFile::open(&path).unwrap();
    assert_eq!(
        (file.version(), file.file_bytes(), file.path()),
        (3, 98_362_432, path.as_path())
    );
    assert_eq!(file.tensor_names().count(), 272);
    let embedding = file.tensor("token_embd.weight").unwrap();
    assert_eq!((embedding.kind, embedding.dims), (GgmlType::Q8_0, &[576, 49_152][..]));
    assert_eq!((embedding.row_elements(), embedding.rows()), (576, 49_152));
    assert_eq!(embedding.bytes.len(), embedding.element_count() / 32 * 34);
    assert_eq!(file.tensor("blk.29.attn_k.weight").unwrap().kind, GgmlType::Q4_1);
    let norm = file.tensor("output_norm.weight").unwrap();
    assert_eq!((norm.kind, norm.rows(), norm.row_elements()), (GgmlType::F32, 1, 576));
    assert_eq!(norm.bytes.as_ptr().align_offset(8), 0);
    assert_eq!(file.u32("llama.block_count").unwrap(), 30);
    assert_eq!(file.str_array("tokenizer.ggml.tokens").unwrap().len(), 49_152);
    assert_eq!(file.i32_array("tokenizer.ggml.token_type").unwrap()[..3], [3, 3, 3]);
    assert!(!file.bool("tokenizer.ggml.add_bos_token").unwrap());
    assert_eq!(
        hex(&file.content_sha256()),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    );
}

#[test]
fn getters_name_the_key_and_the_types() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.gguf");
    let builder = GgufBuilder::new()
        .metadata("text", MetadataValue::String("x".into()))
        .metadata("big", MetadataValue::U64(1 << 40))
        .metadata("negative", MetadataValue::I8(-1))
        .metadata("mixed", MetadataValue::Array(vec![MetadataValue::F64(0.5)]));
    builder.write(&path).unwrap();
    let file = GgufFile::open(&path).unwrap();
    assert!(matches!(file.u32("absent"), Err(GgufError::MissingKey { key }) if key == "absent"));
    assert!(
        matches!(file.u32("text"), Err(GgufError::WrongType { key, expected: "u32", found: "a string" }) if key == "text")
    );
    assert!(matches!(file.u32("big"), Err(GgufError::OutOfRange { key, .. }) if key == "big"));
    assert_eq!(file.u64("big").unwrap(), 1 << 40);
    assert!(matches!(file.u64("negative"), Err(GgufError::OutOfRange { .. })));
    assert!(matches!(file.str_array("mixed"), Err(GgufError::WrongType { .. })));
    assert_eq!(file.f32_array("mixed").unwrap(), [0.5]);
    assert_eq!(optional(file.f32("absent")).unwrap(), None);
    assert!(optional(file.f32("text")).is_err());
    assert!(matches!(file.tensor("w"), Err(GgufError::MissingTensor { tensor }) if tensor == "w"));
}

#[test]
fn every_metadata_type_survives_a_round_trip() {
    let inner = MetadataValue::Array(vec![MetadataValue::U8(7), MetadataValue::U8(8)]);
    let values = [
        MetadataValue::U8(1),
        MetadataValue::I8(-2),
        MetadataValue::U16(3),
        MetadataValue::I16(-4),
        MetadataValue::U32(5),
        MetadataValue::I32(-6),
        MetadataValue::F32(0.25),
        MetadataValue::Bool(true),
        MetadataValue::String("wörld".into()),
        MetadataValue::Array(vec![inner.clone(), inner]),
        MetadataValue::U64(9),
        MetadataValue::I64(-10),
        MetadataValue::F64(0.125),
    ];
    for version in [2, 3] {
        let metadata = values
            .iter()
            .enumerate()
            .map(|(index, value)| (index.to_string(), value.clone()))
            .collect();
        let contents = parse(&GgufBuilder {
            version,
            metadata,
            ..GgufBuilder::new()
        })
        .unwrap();
        for (index, value) in values.iter().enumerate() {
            assert_eq!(&contents.metadata[&index.to_string()], value);
        }
    }
}

#[test]
fn wrong_headers() {
    assert!(matches!(Contents::parse(b"PK\x03\x04"), Err(GgufError::NotGguf { .. })));
    assert!(matches!(Contents::parse(b""), Err(GgufError::Truncated { .. })));
    let version = |version| {
        parse(&GgufBuilder {
            version,
            ..GgufBuilder::new()
        })
    };
    assert!(matches!(version(1), Err(GgufError::UnsupportedVersion { version: 1 })));
    assert!(matches!(version(4), Err(GgufError::UnsupportedVersion { version: 4 })));
    assert!(matches!(version(3u32.swap_bytes()), Err(GgufError::BigEndian)));
    let missing = GgufFile::open(Path::new("/nonexistent/model.gguf"));
    assert!(matches!(missing, Err(GgufError::Io { path, .. }) if path.ends_with("model.gguf")));
    assert!(matches!(GgufFile::open(Path::new("/")), Err(GgufError::Io { .. })));
}

#[test]
fn counts_are_checked_before_anything_is_allocated() {
    for count in [3, 60_000] {
        let tensors = GgufBuilder {
            tensor_count: Some(count),
            ..GgufBuilder::new()
        };
        assert!(matches!(parse(&tensors), Err(GgufError::Truncated { .. })));
        let keys = GgufBuilder {
            key_count: Some(count),
            ..GgufBuilder::new()
        };
        assert!(matches!(parse(&keys), Err(GgufError::Truncated { .. })));
    }
    for count in [1 << 20, u64::MAX] {
        let tensors = GgufBuilder {
            tensor_count: Some(count),
            ..GgufBuilder::new()
        };
        assert!(matches!(parse(&tensors), Err(GgufError::AboveLimit { .. })));
        let keys = GgufBuilder {
            key_count: Some(count),
            ..GgufBuilder::new()
        };
        assert!(matches!(parse(&keys), Err(GgufError::AboveLimit { .. })));
    }
    // An array and a string that claim far more than the file holds.
    for (type_id, length) in [(9u32, u64::MAX), (9, 1 << 21), (8, u64::MAX), (8, 1 << 40)] {
        let mut bytes = GgufBuilder {
            key_count: Some(1),
            ..GgufBuilder::new()
        }
        .build();
        bytes.extend(1u64.to_le_bytes());
        bytes.push(b'k');
        bytes.extend(type_id.to_le_bytes());
        if type_id == 9 {
            bytes.extend(0u32.to_le_bytes());
        }
        bytes.extend(length.to_le_bytes());
        let refused = Contents::parse(&bytes).err();
        assert!(
            matches!(&refused, Some(GgufError::Truncated { reading, .. } | GgufError::AboveLimit { reading, .. }) if reading.contains("\"k\"")),
            "{refused:?}"
        );
    }
}

#[test]
fn strange_values_are_refused() {
    let nest = |depth| (0..depth).fold(MetadataValue::U8(1), |inner, _| MetadataValue::Array(vec![inner]));
    assert!(parse(&GgufBuilder::new().metadata("k", nest(4))).is_ok());
    assert!(matches!(
        parse(&GgufBuilder::new().metadata("k", nest(5))),
        Err(GgufError::NestedTooDeep { .. })
    ));
    let twice = GgufBuilder {
        metadata: vec![("k".into(), nest(0)), ("k".into(), nest(0))],
        ..GgufBuilder::new()
    };
    assert!(matches!(parse(&twice), Err(GgufError::DuplicateKey { key }) if key == "k"));
    let alignment = |value| parse(&GgufBuilder::new().metadata("general.alignment", value));
    assert!(matches!(
        alignment(MetadataValue::U32(0)),
        Err(GgufError::BadAlignment { alignment: 0 })
    ));
    assert!(matches!(
        alignment(MetadataValue::U32(24)),
        Err(GgufError::BadAlignment { alignment: 24 })
    ));
    assert!(matches!(
        alignment(MetadataValue::F32(32.0)),
        Err(GgufError::WrongType { .. })
    ));
    let mut bool_2 = GgufBuilder::new().metadata("k", MetadataValue::Bool(true)).build();
    *bool_2.last_mut().unwrap() = 2;
    assert!(matches!(
        Contents::parse(&bool_2),
        Err(GgufError::InvalidBool { byte: 2, .. })
    ));
    let mut latin_1 = GgufBuilder::new()
        .metadata("k", MetadataValue::String("x".into()))
        .build();
    *latin_1.last_mut().unwrap() = 0xFF;
    assert!(matches!(Contents::parse(&latin_1), Err(GgufError::InvalidUtf8 { .. })));
}

#[test]
fn strange_tensors_are_refused_by_name() {
    let tensor = f32_tensor;
    let check = |tensor: BuiltTensor| parse(&one_tensor(tensor)).err().expect("must be refused");
    let i_quant = check(BuiltTensor {
        type_id: 20,
        ..tensor("w")
    });
    assert!(
        matches!(&i_quant, GgufError::UnsupportedType { tensor, type_id: 20, type_name: "IQ4_NL", .. } if tensor == "w")
    );
    assert!(
        GgmlType::ALL
            .iter()
            .all(|kind| i_quant.to_string().contains(kind.name()))
    );
    let zero = check(BuiltTensor {
        dims: vec![8, 0],
        ..tensor("w")
    });
    assert!(matches!(zero, GgufError::BadDimensions { .. }));
    let none = check(BuiltTensor {
        dims: vec![],
        ..tensor("w")
    });
    assert!(matches!(
        none,
        GgufError::BadDimensions { .. } | GgufError::Truncated { .. }
    ));
    let huge = check(BuiltTensor {
        dims: vec![1 << 40, 1 << 40],
        ..tensor("w")
    });
    assert!(matches!(huge, GgufError::BadDimensions { .. }));
    let outside = check(BuiltTensor {
        dims: vec![1 << 62],
        type_id: 1,
        ..tensor("w")
    });
    assert!(matches!(outside, GgufError::TensorOutsideFile { .. }));
    let five = check(BuiltTensor {
        dims: vec![1; 5],
        ..tensor("w")
    });
    assert!(matches!(five, GgufError::AboveLimit { .. }));
    let ragged = check(BuiltTensor {
        type_id: 8,
        dims: vec![40, 4],
        ..tensor("w")
    });
    assert!(matches!(ragged, GgufError::RowNotBlocks { row_elements: 40, .. }));
    for kind in GgmlType::ALL {
        let (elements, bytes) = (kind.block_elements() as u64, kind.block_bytes());
        let of = |row: u64, length: usize| BuiltTensor {
            type_id: kind.id(),
            dims: vec![row, 2],
            bytes: vec![0; length],
            ..tensor("w")
        };
        assert!(
            parse(&one_tensor(of(2 * elements, 4 * bytes))).is_ok(),
            "{}",
            kind.name()
        );
        let short = check(of(2 * elements, 4 * bytes - 1));
        assert!(matches!(short, GgufError::TensorOutsideFile { .. }), "{}", kind.name());
        let endless = check(of(u64::MAX / elements * elements, 4 * bytes));
        assert!(matches!(endless, GgufError::BadDimensions { .. }), "{}", kind.name());
        if elements > 1 {
            let ragged = check(of(elements + 1, 4 * bytes));
            assert!(matches!(ragged, GgufError::RowNotBlocks { .. }), "{}", kind.name());
        }
    }
    let misaligned = check(BuiltTensor {
        offset: Some(16),
        ..tensor("w")
    });
    assert!(matches!(misaligned, GgufError::MisalignedTensor { offset: 16, .. }));
    let beyond = check(BuiltTensor {
        offset: Some(u64::MAX - 31),
        ..tensor("w")
    });
    assert!(matches!(beyond, GgufError::TensorOutsideFile { .. }));
    let pair = |second: BuiltTensor| {
        parse(&GgufBuilder {
            tensors: vec![tensor("a"), second],
            ..GgufBuilder::new()
        })
    };
    assert!(matches!(pair(tensor("a")), Err(GgufError::DuplicateTensor { tensor }) if tensor == "a"));
    let overlap = pair(BuiltTensor {
        offset: Some(0),
        ..tensor("b")
    });
    assert!(matches!(overlap, Err(GgufError::OverlappingTensors { first, second }) if first == "a" && second == "b"));
    assert!(pair(tensor("b")).is_ok());
}

#[test]
fn truncation_anywhere_is_a_typed_error() {
    // Every length of a tiny file, and a few thousand of the real one.
    let tiny = GgufBuilder {
        ..TinyModel {
            layer_count: 1,
            ..TinyModel::default()
        }
        .build()
    }
    .build();
    for length in 0..20_000.min(tiny.len()) {
        assert!(Contents::parse(&tiny[..length]).is_err(), "length {length}");
    }
    assert!(Contents::parse(&tiny).is_ok());
    let real = std::fs::read(model_path()).unwrap();
    let mut random = StdRng::seed_from_u64(1);
    for _ in 0..20 {
        let length = random.random_range(0..REAL_HEADER_BYTES);
        assert!(
            matches!(Contents::parse(&real[..length]), Err(GgufError::Truncated { .. })),
            "length {length}"
        );
    }
    for _ in 0..20 {
        let length = random.random_range(REAL_HEADER_BYTES..real.len());
        assert!(
            matches!(
                Contents::parse(&real[..length]),
                Err(GgufError::TensorOutsideFile { .. })
            ),
            "length {length}"
        );
    }
    let error = Contents::parse(&real[..real.len() / 2]).err().unwrap().to_string();
    assert!(error.contains("baton model pull"), "{error}");
}

/// Mutations of a small complete model: whatever comes out, it is a value or a typed error, quickly.
#[test]
fn thousands_of_mutations_never_panic() {
    let original = TinyModel {
        layer_count: 1,
        // Some of each size of block.
        other_kinds: &[("attn_q.weight", GgmlType::BF16), ("ffn_up.weight", GgmlType::Q5_0)],
        ..TinyModel::default()
    }
    .build()
    .build();
    // The header ends well before the weights; damage there is what matters.
    let header = original.len().min(12_000);
    let mut random = StdRng::seed_from_u64(2);
    let (mut refused, mut accepted) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = original.clone();
        for _ in 0..random.random_range(1..=4) {
            mutate(&mut bytes, header, &mut random);
        }
        match Contents::parse(&bytes) {
            Ok(contents) => {
                accepted += 1;
                assert!(
                    contents
                        .tensors
                        .iter()
                        .all(|entry| entry.start <= entry.end && entry.end <= bytes.len())
                );
            }
            Err(error) => {
                refused += 1;
                assert!(!error.to_string().is_empty());
            }
        }
    }
    assert!(
        refused > 1_000 && accepted > 100,
        "the mutations are too weak or too strong: {refused} {accepted}"
    );
}

fn mutate(bytes: &mut Vec<u8>, header: usize, random: &mut StdRng) {
    let at = random.random_range(0..header.min(bytes.len()));
    match random.random_range(0..6) {
        0 => bytes[at] ^= 1 << random.random_range(0..8),
        1 => bytes[at] = random.random(),
        2 => bytes.truncate(at.max(8)),
        // Interesting 64-bit numbers where a length or an offset may be.
        3 => {
            let numbers = [
                0,
                1,
                u64::MAX,
                u64::MAX - 31,
                1 << 31,
                1 << 32,
                1 << 62,
                bytes.len() as u64,
            ];
            let number = numbers[random.random_range(0..numbers.len())].to_le_bytes();
            let end = (at + 8).min(bytes.len());
            bytes[at..end].copy_from_slice(&number[..end - at]);
        }
        4 => {
            let copied = bytes[at..(at + 64).min(bytes.len())].to_vec();
            let to = random.random_range(0..header.min(bytes.len()));
            bytes.splice(to..to, copied);
        }
        _ => {
            bytes.drain(at..(at + random.random_range(1..64)).min(bytes.len()));
        }
    }
    if bytes.len() < 64 {
        bytes.resize(64, 0);
    }
}

#[test]
fn byte_flips_in_the_real_header_never_panic() {
    let mut real = std::fs::read(model_path()).unwrap();
    let mut random = StdRng::seed_from_u64(3);
    for _ in 0..40 {
        let at = random.random_range(0..REAL_HEADER_BYTES);
        let old = real[at];
        real[at] = random.random();
        if let Err(error) = Contents::parse(&real) {
            assert!(!error.to_string().is_empty());
        }
        real[at] = old;
    }
    assert!(Contents::parse(&real).is_ok());
}
