//! Split models: whole, with parts that miss or contradict each other, and damaged.

use std::path::PathBuf;

use rand::{Rng, SeedableRng, rngs::StdRng};

use super::*;
use crate::model::{Model, ModelError};
use crate::test_kit::{GgufBuilder, TinyModel};

const PARTS: usize = 3;

/// A tiny model in three parts, as gguf-split writes it: all metadata in the first.
struct SplitModel {
    folder: tempfile::TempDir,
    parts: Vec<GgufBuilder>,
}

fn whole() -> GgufBuilder {
    TinyModel {
        layer_count: 1,
        ..TinyModel::default()
    }
    .build()
}

impl SplitModel {
    fn new() -> SplitModel {
        let whole = whole();
        let total = whole.tensors.len();
        let part = |index: usize, tensors: &[_]| {
            let mut part = GgufBuilder {
                tensors: tensors.to_vec(),
                ..GgufBuilder::new()
            };
            if index == 0 {
                part.metadata = whole.metadata.clone();
            }
            part.metadata("split.no", MetadataValue::U16(index as u16))
                .metadata("split.count", MetadataValue::U16(PARTS as u16))
                .metadata("split.tensors.count", MetadataValue::I32(total as i32))
        };
        let parts: Vec<_> = whole
            .tensors
            .chunks(total.div_ceil(PARTS))
            .enumerate()
            .map(|(index, tensors)| part(index, tensors))
            .collect();
        let model = SplitModel {
            folder: tempfile::tempdir().unwrap(),
            parts,
        };
        (0..PARTS).for_each(|index| model.write(index, &model.parts[index]));
        model
    }

    fn path(&self, index: usize) -> PathBuf {
        let name = format!("tiny-{:05}-of-{PARTS:05}.gguf", index + 1);
        self.folder.path().join(name)
    }

    fn write(&self, index: usize, part: &GgufBuilder) {
        part.write(&self.path(index)).unwrap();
    }

    fn open(&self) -> Result<GgufFile, GgufError> {
        GgufFile::open(&self.path(0))
    }

    /// The error when a part has this value of a key.
    fn with(&self, index: usize, key: &str, value: MetadataValue) -> GgufError {
        self.write(index, &self.parts[index].clone().metadata(key, value));
        let error = self.open().expect_err("must be refused");
        self.write(index, &self.parts[index]);
        error
    }
}

#[test]
fn the_parts_together_are_the_model() {
    let split = SplitModel::new();
    let path = split.folder.path().join("whole.gguf");
    whole().write(&path).unwrap();
    let (one, parts) = (Model::open(&path).unwrap(), Model::open(&split.path(0)).unwrap());
    assert_eq!(one.config(), parts.config());
    let mut names = 0;
    for name in one.files().tensor_names() {
        assert_eq!(
            one.tensor(name).unwrap().bytes,
            parts.tensor(name).unwrap().bytes,
            "{name}"
        );
        names += 1;
    }
    assert_eq!(names, parts.files().tensor_names().count());
    assert_eq!(
        one.tokenizer().unwrap().content_hash(),
        parts.tokenizer().unwrap().content_hash()
    );
    let file = split.open().unwrap();
    let bytes = |index| std::fs::metadata(split.path(index)).unwrap().len();
    assert_eq!(
        (file.part_count(), file.file_bytes()),
        (PARTS, (0..PARTS).map(bytes).sum())
    );
    assert_eq!(
        file.content_sha256(),
        SplitModel::new().open().unwrap().content_sha256()
    );
    let hash = file.content_sha256();
    drop(file);
    split.write(2, &split.parts[2].clone().metadata("more", MetadataValue::U8(1)));
    assert_ne!(split.open().unwrap().content_sha256(), hash);
}

#[test]
fn missing_and_surplus_parts_are_refused() {
    let split = SplitModel::new();
    let error = GgufFile::open(&split.path(1)).unwrap_err();
    assert!(
        matches!(&error, GgufError::NotTheFirstPart { part: 2, first, .. } if *first == split.path(0)),
        "{error}"
    );
    std::fs::remove_file(split.path(2)).unwrap();
    let error = split.open().unwrap_err();
    assert!(
        matches!(&error, GgufError::MissingPart { path, count: 3 } if *path == split.path(2)),
        "{error}"
    );
    // More tensors than the model has, and fewer.
    let mut surplus = split.parts[2].clone();
    surplus.tensors.push(crate::test_kit::BuiltTensor {
        name: "more".to_owned(),
        ..surplus.tensors[0].clone()
    });
    split.write(2, &surplus);
    assert!(matches!(split.open(), Err(GgufError::PartTensors { .. })));
    surplus.tensors.drain(..2);
    split.write(2, &surplus);
    assert!(matches!(split.open(), Err(GgufError::PartTensors { .. })));
    let mut twice = split.parts[2].clone();
    twice.tensors[0] = split.parts[0].tensors[0].clone();
    split.write(2, &twice);
    let error = split.open().unwrap_err();
    assert!(
        matches!(&error, GgufError::DuplicateTensor { tensor } if *tensor == twice.tensors[0].name),
        "{error}"
    );
    let renamed = split.folder.path().join("renamed.gguf");
    std::fs::rename(split.path(0), &renamed).unwrap();
    assert!(matches!(
        GgufFile::open(&renamed),
        Err(GgufError::PartName { count: 3, .. })
    ));
}

#[test]
fn parts_that_contradict_each_other_are_refused() {
    let split = SplitModel::new();
    for (key, value) in [
        ("split.no", MetadataValue::U16(2)),
        ("split.no", MetadataValue::String("1".into())),
        ("split.count", MetadataValue::U16(4)),
        ("split.tensors.count", MetadataValue::I32(1)),
        ("split.tensors.count", MetadataValue::I32(-1)),
    ] {
        let error = split.with(1, key, value);
        assert!(
            matches!(&error, GgufError::PartDisagrees { path, key: found, .. } if *found == key && *path == split.path(1)),
            "{key}: {error}"
        );
    }
    assert!(matches!(
        split.with(0, "split.count", MetadataValue::U64(u64::MAX)),
        GgufError::AboveLimit { .. }
    ));
    assert!(matches!(
        split.with(0, "split.count", MetadataValue::U16(2)),
        GgufError::PartName { count: 2, .. }
    ));
    for key in ["split.count", "split.no", "split.tensors.count"] {
        let error = split.with(0, key, MetadataValue::F32(1.0));
        assert!(
            matches!(&error, GgufError::WrongType { key: found, .. } if found == key),
            "{error}"
        );
    }
    assert!(matches!(
        split.with(0, "split.no", MetadataValue::U64(u64::MAX)),
        GgufError::NotTheFirstPart { .. }
    ));
    let without = split.parts[0].clone().without_metadata("split.tensors.count");
    split.write(0, &without);
    assert!(matches!(split.open(), Err(GgufError::MissingKey { key }) if key == "split.tensors.count"));
    // A file that says that it is the only part is a whole model.
    let alone = whole().metadata("split.count", MetadataValue::U16(1));
    split.write(0, &alone);
    assert_eq!(split.open().unwrap().part_count(), 1);
}

#[test]
fn mutations_of_a_part_never_panic() {
    let split = SplitModel::new();
    let original = split.parts[1].build();
    let mut random = StdRng::seed_from_u64(5);
    let mut refused = 0;
    for round in 0..600 {
        let mut bytes = original.clone();
        if round % 3 == 0 {
            bytes.truncate(random.random_range(0..bytes.len()));
        }
        for _ in 0..2 {
            // The header has about 500 bytes.
            let at = random.random_range(0..500);
            if let Some(byte) = bytes.get_mut(at) {
                *byte = random.random();
            }
        }
        std::fs::write(split.path(1), &bytes).unwrap();
        match Model::open(&split.path(0)) {
            Ok(model) => assert!(model.files().tensor_names().all(|name| model.tensor(name).is_ok())),
            Err(ModelError::Gguf(error)) => {
                refused += 1;
                assert!(!error.to_string().is_empty());
            }
            Err(_) => refused += 1,
        }
    }
    assert!(
        (300..600).contains(&refused),
        "the mutations are too weak or too strong: {refused}"
    );
}
