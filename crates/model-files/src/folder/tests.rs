//! Folders: the same model as in a GGUF file, the forms that config.json may have, and damaged files.

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};

use super::*;
use crate::arch::SUPPORTED;
use crate::config::{ConfigError, ModelConfig, RopeScaling};
use crate::gguf::{GgmlType, MetadataValue, dequantise_row};
use crate::model::{Model, ModelError};
use crate::test_kit::{Stored, TinyFolder, TinyModel, safetensors};
use crate::tokenizer::TokenizerError;

mod configs;

/// A tiny model of the family as a GGUF file, and its folder.
struct Both {
    root: tempfile::TempDir,
    gguf: Model,
}

fn both(tiny: &TinyModel, shards: usize) -> Both {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("tiny.gguf");
    // A window, so that the families have theirs in their layers.
    let window = tiny.architecture.key("attention.sliding_window");
    let file = tiny.build().metadata(&window, MetadataValue::U32(64));
    file.write(&path).unwrap();
    let gguf = Model::open(&path).unwrap();
    let both = Both { root, gguf };
    std::fs::create_dir(both.folder()).unwrap();
    TinyFolder {
        model: &both.gguf,
        shards,
    }
    .write(&both.folder());
    both
}

impl Both {
    fn folder(&self) -> PathBuf {
        self.root.path().join("tiny")
    }

    fn open(&self) -> Result<Model, ModelError> {
        Model::open(&self.folder())
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.folder().join(name)).unwrap()
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.folder().join(name), bytes).unwrap();
    }

    fn refused(&self) -> ModelError {
        self.open().expect_err("must be refused")
    }

    fn with_config(&self, change: impl FnOnce(&mut Value)) -> Result<ModelConfig, ConfigError> {
        let mut config: Value = serde_json::from_slice(&self.read("config.json")).unwrap();
        change(&mut config);
        self.write("config.json", config.to_string().as_bytes());
        match self.open() {
            Ok(model) => Ok(model.config().clone()),
            Err(ModelError::Config(error)) => Err(error),
            Err(error) => panic!("{error}"),
        }
    }
}

fn llama() -> TinyModel {
    TinyModel {
        layer_count: 1,
        matrix_kind: GgmlType::BF16,
        tied_embeddings: false,
        ..TinyModel::default()
    }
}

#[test]
fn every_family_has_the_numbers_and_weights_of_its_gguf_file() {
    for (index, architecture) in SUPPORTED.iter().enumerate() {
        let kinds = [GgmlType::F32, GgmlType::F16, GgmlType::BF16];
        let both = both(
            &TinyModel {
                architecture,
                layer_count: 7,
                matrix_kind: kinds[index % 3],
                tied_embeddings: index % 2 == 0,
                ..TinyModel::default()
            },
            1 + index % 3,
        );
        let folder = both.open().unwrap();
        let (mut expected, found) = (both.gguf.config().clone(), folder.config());
        for rope in std::iter::once(&mut expected.rope).chain(&mut expected.window_rope) {
            rope.pairs = crate::arch::RopePairs::Halves;
        }
        assert_eq!(*found, expected, "{}", architecture.name);
        let mut names = 0;
        for name in both.gguf.files().tensor_names() {
            let (one, other) = (both.gguf.tensor(name).unwrap(), folder.tensor(name).unwrap());
            assert_eq!((one.dims, one.kind), (other.dims, other.kind), "{name}");
            if one.dims.len() == 1 {
                let (one, other) = (both.gguf.vector(name).unwrap(), folder.vector(name).unwrap());
                let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
                assert!(one.iter().zip(&other).all(near), "{} {name}", architecture.name);
            } else if architecture.name != "llama" {
                assert_eq!(one.bytes, other.bytes, "{} {name}", architecture.name);
            }
            names += 1;
        }
        assert_eq!(names, folder.files().tensor_names().count());
    }
}

#[test]
fn the_rows_of_llama_are_turned_back() {
    let both = both(&llama(), 1);
    let folder = both.open().unwrap();
    let name = "blk.0.attn_k.weight";
    let (neighbours, halves) = (both.gguf.tensor(name).unwrap(), folder.tensor(name).unwrap());
    let row = |tensor: &Tensor<'_>, row| {
        let mut out = vec![0.0; tensor.row_elements()];
        dequantise_row(tensor, row, &mut out);
        out
    };
    // Heads of 16: rows 0 and 8 of a folder are 0 and 1 of a GGUF file. The second head starts at 16.
    for (in_folder, in_gguf) in [(0, 0), (8, 1), (1, 2), (9, 3), (16, 16), (24, 17), (31, 31)] {
        assert_eq!(row(&halves, in_folder), row(&neighbours, in_gguf), "{in_folder}");
    }
}

#[test]
fn equal_content_gives_equal_hashes_in_any_folder() {
    let (one, other) = (both(&llama(), 2), both(&llama(), 2));
    let hash = |both: &Both| both.open().unwrap().content_sha256();
    assert_eq!(hash(&one), hash(&other));
    let more_files = both(&llama(), 3);
    assert_ne!(hash(&one), hash(&more_files));
    // The tokenizer has a hash of its own.
    one.write("tokenizer_config.json", b"{}");
    assert_eq!(hash(&one), hash(&other));
    let last = one.read("model-00002-of-00002.safetensors");
    let mut changed = last.clone();
    *changed.last_mut().unwrap() ^= 1;
    one.write("model-00002-of-00002.safetensors", &changed);
    assert_ne!(hash(&one), hash(&other));
    one.write("model-00002-of-00002.safetensors", &last);
    let config = String::from_utf8(one.read("config.json")).unwrap() + "\n";
    one.write("config.json", config.as_bytes());
    assert_ne!(hash(&one), hash(&other));
}

#[test]
fn the_tokenizer_gives_the_ids_of_the_gguf_file_and_has_no_token_without_a_row() {
    let both = both(&llama(), 1);
    let ids = |model: &Model| {
        let text = "<|im_start|>user\nÅ12 of <image>, 3<|im_end|>";
        model.tokenizer().unwrap().encode(text, true).unwrap()
    };
    let expected = ids(&both.gguf);
    assert_eq!(ids(&both.open().unwrap()), expected);
    let mut file: Value = serde_json::from_slice(&both.read("tokenizer.json")).unwrap();
    let beyond = json!({ "id": 259, "content": "<image>", "special": true, "normalized": false });
    file["added_tokens"].as_array_mut().unwrap().push(beyond);
    both.write("tokenizer.json", file.to_string().as_bytes());
    assert_eq!(ids(&both.open().unwrap()), expected);
    file["model"]["vocab"]["zz"] = json!(259);
    both.write("tokenizer.json", file.to_string().as_bytes());
    let error = both
        .open()
        .unwrap()
        .tokenizer()
        .expect_err("a token of the model itself");
    assert!(
        matches!(error, TokenizerError::VocabularySize { found: 260, max: 259 }),
        "{error}"
    );
}

#[test]
fn a_folder_without_its_files_says_which() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Model::open(folder.path()).expect_err("must be refused");
    assert!(matches!(open(), ModelError::Folder(FolderError::NoConfig { .. })));
    let both = both(&llama(), 1);
    std::fs::write(folder.path().join("config.json"), both.read("config.json")).unwrap();
    assert!(matches!(open(), ModelError::Folder(FolderError::NoWeights { .. })));
    std::fs::create_dir(folder.path().join("model.safetensors")).unwrap();
    assert!(matches!(open(), ModelError::Folder(FolderError::Io { .. })));
}

#[test]
fn the_index_and_the_files_must_agree() {
    const INDEX: &str = "model.safetensors.index.json";
    let both = both(&llama(), 2);
    let original = both.read(INDEX);
    let check = |change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let mut index: Value = serde_json::from_slice(&original).unwrap();
        change(index["weight_map"].as_object_mut().unwrap());
        both.write(INDEX, index.to_string().as_bytes());
        match both.refused() {
            ModelError::Folder(error) => error,
            error => panic!("{error}"),
        }
    };
    for name in [
        "../secret.safetensors",
        "/etc/x.safetensors",
        ".hidden.safetensors",
        "weights.bin",
        "a\0.safetensors",
    ] {
        let error = check(&|map| {
            map.insert("x".into(), name.into());
        });
        assert!(
            matches!(&error, FolderError::BadShardName { name: found } if found == name),
            "{error}"
        );
    }
    let error = check(&|map| {
        map.insert("x".into(), "model-00003-of-00002.safetensors".into());
    });
    assert!(
        matches!(&error, FolderError::MissingShard { file } if file.starts_with("model-00003")),
        "{error}"
    );
    let error = check(&|map| {
        map.insert("x".into(), "model-00001-of-00002.safetensors".into());
    });
    assert!(
        matches!(&error, FolderError::IndexDisagrees { tensor, .. } if tensor == "x"),
        "{error}"
    );
    let error = check(&|map| {
        map.remove("lm_head.weight");
    });
    assert!(
        matches!(&error, FolderError::IndexDisagrees { tensor, .. } if tensor == "lm_head.weight"),
        "{error}"
    );
    let text = String::from_utf8(original.clone()).unwrap();
    let twice = text.replacen("\"lm_head.weight\":", "\"model.norm.weight\":", 1);
    both.write(INDEX, twice.as_bytes());
    assert!(matches!(
        both.refused(),
        ModelError::Folder(FolderError::DuplicateTensor { .. })
    ));
    for broken in ["", "[]", "{}", "{\"weight_map\": 1}", "{\"weight_map\": {\"a\": 1}}"] {
        both.write(INDEX, broken.as_bytes());
        assert!(
            matches!(both.refused(), ModelError::Folder(FolderError::Json { .. })),
            "{broken}"
        );
    }
    both.write(INDEX, &vec![b' '; (16 << 20) + 1]);
    assert!(matches!(
        both.refused(),
        ModelError::Folder(FolderError::AboveLimit { .. })
    ));
    // The single file counts where both are.
    both.write("model.safetensors", b"");
    assert!(matches!(
        both.refused(),
        ModelError::Folder(FolderError::Truncated { .. })
    ));
}

fn parse(bytes: &[u8]) -> Result<Vec<super::safetensors::Entry>, FolderError> {
    super::safetensors::parse(bytes, "x.safetensors")
}

/// A file with this header and 32 bytes of data.
fn headed(header: &str) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.bytes());
    out.extend([0; 32]);
    out
}

fn entry(name: &str, (dtype, shape): (&str, &str), offsets: (u64, u64)) -> String {
    format!(
        r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{},{}]}}"#,
        offsets.0, offsets.1
    )
}

#[test]
fn the_header_is_checked_before_anything_is_allocated() {
    assert!(matches!(
        parse(b""),
        Err(FolderError::Truncated { needed: 8, left: 0, .. })
    ));
    assert!(matches!(parse(&[1, 2, 3]), Err(FolderError::Truncated { .. })));
    for length in [33u64, 1 << 20] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend([b' '; 32]);
        assert!(matches!(parse(&bytes), Err(FolderError::Truncated { needed, left: 32, .. }) if needed == length));
    }
    for length in [u64::MAX, 1 << 63, (16 << 20) + 1] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend([b' '; 32]);
        assert!(matches!(parse(&bytes), Err(FolderError::AboveLimit { value, .. }) if value == length));
    }
    let many: Vec<String> = (0..65_537)
        .map(|index| entry(&index.to_string(), ("X", "[]"), (0, 0)))
        .collect();
    let many = format!("{{{}}}", many.join(","));
    assert!(matches!(
        parse(&headed(&many)),
        Err(FolderError::AboveLimit { value: 65_537, .. })
    ));
    let deep = "[".repeat(100_000);
    assert!(matches!(parse(&headed(&deep)), Err(FolderError::Json { .. })));
    let deep = format!("{{\"__metadata__\":{}", "{\"a\":".repeat(100_000));
    assert!(matches!(parse(&headed(&deep)), Err(FolderError::Json { .. })));
    for broken in [
        "",
        "{",
        "[]",
        "{\"a\":1}",
        "{\"a\":{}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,99999999999999999999]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"more\":1}}",
    ] {
        assert!(
            matches!(parse(&headed(broken)), Err(FolderError::Json { .. })),
            "{broken}"
        );
    }
}

/// `make_safetensors.py` is beside the data.
#[test]
fn a_file_of_the_python_package_is_read() {
    let bytes = include_bytes!("../../testdata/python.safetensors");
    let entries = parse(bytes).unwrap();
    let find = |name: &str| entries.iter().find(|entry| entry.name == name).unwrap();
    let values = |name: &str| {
        let entry = find(name);
        let tensor = Tensor {
            name,
            kind: entry.kind().unwrap(),
            dims: &entry.dims,
            bytes: &bytes[entry.start..entry.end],
        };
        let row = |row| {
            let mut out = vec![0.0; tensor.row_elements()];
            dequantise_row(&tensor, row, &mut out);
            out
        };
        (0..tensor.rows()).map(row).collect::<Vec<_>>()
    };
    assert_eq!(values("a"), [[0.5, -0.25, 0.125]]);
    assert_eq!(values("b"), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]);
    assert_eq!((find("ids").dtype.as_str(), find("ids").kind()), ("I64", None));
    assert_eq!(entries.len(), 3);
}

#[test]
fn ranges_and_shapes_of_tensors_are_checked() {
    let one = |kind: (&str, &str), offsets| parse(&headed(&format!("{{{}}}", entry("a", kind, offsets))));
    let two = |second: String| {
        let first = entry("a", ("F32", "[2,2]"), (0, 16));
        parse(&headed(&format!("{{{first},{second}}}")))
    };
    let sound = two(entry("b", ("BF16", "[8]"), (16, 32))).unwrap();
    assert_eq!(
        (sound[0].dims.as_slice(), sound[1].kind()),
        (&[2, 2][..], Some(GgmlType::BF16))
    );
    assert_eq!(
        sound[1].end,
        headed("").len() + headed(&"x".repeat(sound[0].start - 8)).len() - 40
    );
    let order = parse(&headed(&format!("{{{}}}", entry("a", ("F16", "[2,3]"), (0, 12))))).unwrap();
    assert_eq!(order[0].dims, [3, 2], "the length of a row first");
    for offsets in [(0, 33), (16, 8), (33, 33), (u64::MAX, u64::MAX), (0, u64::MAX)] {
        let error = one(("F32", "[8]"), offsets).unwrap_err();
        assert!(
            matches!(error, FolderError::TensorOutsideFile { .. }),
            "{offsets:?}: {error}"
        );
    }
    for (shape, offsets) in [("[4]", (0, 20)), ("[4]", (0, 8)), ("[2,3]", (0, 16)), ("[1]", (0, 0))] {
        let error = one(("F32", shape), offsets).unwrap_err();
        assert!(matches!(error, FolderError::WrongLength { .. }), "{shape}: {error}");
    }
    for shape in [
        "[]",
        "[0]",
        "[0,4]",
        "[1,1,1,1,1]",
        "[18446744073709551615,2]",
        "[4611686018427387904]",
    ] {
        let error = one(("F32", shape), (0, 0)).unwrap_err();
        assert!(matches!(error, FolderError::BadShape { .. }), "{shape}: {error}");
    }
    let overlap = two(entry("b", ("F32", "[2]"), (12, 20))).unwrap_err();
    assert!(matches!(&overlap, FolderError::OverlappingTensors { first, second } if first == "a" && second == "b"));
    let inside = two(entry("b", ("F32", "[1]"), (4, 8))).unwrap_err();
    assert!(matches!(inside, FolderError::OverlappingTensors { .. }));
    let twice = two(entry("a", ("F32", "[4]"), (16, 32))).unwrap_err();
    assert!(matches!(twice, FolderError::DuplicateTensor { tensor } if tensor == "a"));
}

#[test]
fn tensors_must_be_exactly_those_of_the_architecture() {
    let both = both(&llama(), 1);
    let tensors = stored(&both);
    let refused = |change: &dyn Fn(&mut Vec<Stored>)| {
        let mut tensors = tensors.clone();
        change(&mut tensors);
        both.write("model.safetensors", &safetensors(&tensors));
        both.refused()
    };
    let extra = |name: &str, dtype| {
        let name = name.to_owned();
        move |tensors: &mut Vec<Stored>| tensors.push((name.clone(), dtype, vec![1], vec![0; 4]))
    };
    for name in [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.00.input_layernorm.weight",
        "model.layers.x.input_layernorm.weight",
        "blk.0.attn_norm.weight",
        "vision_tower.weight",
        "",
    ] {
        let error = refused(&extra(name, "F32"));
        let bias_of_a_family =
            name.ends_with("bias") && matches!(error, ModelError::Config(ConfigError::UnexpectedTensor { .. }));
        assert!(
            bias_of_a_family
                || matches!(&error, ModelError::Folder(FolderError::UnexpectedTensor { tensor, .. }) if tensor == name),
            "{name}: {error}"
        );
    }
    let error = refused(&extra("model.layers.1.input_layernorm.weight", "F32"));
    assert!(
        matches!(error, ModelError::Config(ConfigError::UnexpectedTensor { .. })),
        "{error}"
    );
    // Old versions of transformers saved the table of RoPE.
    let mut old = tensors.clone();
    extra("model.layers.0.self_attn.rotary_emb.inv_freq", "F32")(&mut old);
    both.write("model.safetensors", &safetensors(&old));
    both.open().unwrap();
    let error = refused(&|tensors| tensors[0].1 = "F8_E4M3");
    assert!(
        matches!(&error, ModelError::Folder(FolderError::UnsupportedDtype { dtype, .. }) if dtype == "F8_E4M3"),
        "{error}"
    );
    let error = refused(&|tensors| {
        tensors.retain(|(name, ..)| name != "model.layers.0.mlp.up_proj.weight");
    });
    assert!(
        error.to_string().contains("model.layers.0.mlp.up_proj.weight"),
        "{error}"
    );
    let error = refused(&|tensors| tensors.retain(|(name, ..)| name != "lm_head.weight"));
    assert!(
        error.to_string().contains("lm_head.weight"),
        "untied heads must be there: {error}"
    );
    let error = refused(&|tensors| {
        let norm = tensors
            .iter_mut()
            .find(|(name, ..)| name == "model.norm.weight")
            .unwrap();
        (norm.2, norm.3) = (vec![32], vec![0; 128]);
    });
    assert!(
        matches!(error, ModelError::Config(ConfigError::WrongShape { .. })),
        "{error}"
    );
}

/// The tensors of a folder with one file.
fn stored(both: &Both) -> Vec<Stored> {
    let bytes = both.read("model.safetensors");
    let stored = |entry: super::safetensors::Entry| {
        let kind = entry.kind().unwrap();
        let shape = entry.dims.iter().copied().rev().collect();
        (entry.name, kind.name(), shape, bytes[entry.start..entry.end].to_vec())
    };
    parse(&bytes).unwrap().into_iter().map(stored).collect()
}

#[test]
fn truncation_anywhere_is_a_typed_error() {
    let both = both(&llama(), 1);
    let whole = both.read("model.safetensors");
    for length in (0..whole.len()).step_by(97).chain(whole.len() - 8..whole.len()) {
        assert!(parse(&whole[..length]).is_err(), "length {length}");
    }
    assert!(parse(&whole).is_ok());
    let config = both.read("config.json");
    for length in (0..config.len() - 1).step_by(7) {
        both.write("config.json", &config[..length]);
        assert!(
            matches!(both.refused(), ModelError::Folder(FolderError::Json { .. })),
            "length {length}"
        );
    }
}

/// Mutations of each file of a complete folder: whatever comes out, it is a value or a typed error.
#[test]
fn thousands_of_mutations_never_panic() {
    let both = both(&llama(), 2);
    let mut random = StdRng::seed_from_u64(4);
    let (mut refused, mut accepted) = (0, 0);
    for name in [
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
    ] {
        let original = both.read(name);
        // The header of a file with weights, and some of the weights.
        let end = original.len().min(2_000);
        for _ in 0..500 {
            let mut bytes = original.clone();
            for _ in 0..random.random_range(1..=3) {
                mutate(&mut bytes, end, &mut random);
            }
            both.write(name, &bytes);
            match both.open() {
                Ok(model) => {
                    accepted += 1;
                    for name in model.files().tensor_names() {
                        let tensor = model.tensor(name).unwrap();
                        let mut row = vec![0.0; tensor.row_elements()];
                        dequantise_row(&tensor, tensor.rows() - 1, &mut row);
                    }
                }
                Err(error) => {
                    refused += 1;
                    assert!(!error.to_string().is_empty());
                }
            }
        }
        both.write(name, &original);
    }
    assert!(
        refused > 500 && accepted > 100,
        "the mutations are too weak or too strong: {refused} {accepted}"
    );
}

fn mutate(bytes: &mut Vec<u8>, end: usize, random: &mut StdRng) {
    let at = random.random_range(0..end.min(bytes.len()));
    match random.random_range(0..5) {
        0 => bytes[at] ^= 1 << random.random_range(0..8),
        // A digit instead of whatever was there keeps the JSON sound more often.
        1 => bytes[at] = b'0' + random.random_range(0..10),
        2 => bytes.truncate(at.max(1)),
        3 => {
            let copied = bytes[at..(at + 64).min(bytes.len())].to_vec();
            let to = random.random_range(0..end.min(bytes.len()));
            bytes.splice(to..to, copied);
        }
        _ => {
            let numbers = ["-1", "0", "1e99", "18446744073709551615", "null", "[]", "\"\"", "{}"];
            let number = numbers[random.random_range(0..numbers.len())].bytes();
            bytes.splice(at..(at + 1).min(bytes.len()), number);
        }
    }
}
