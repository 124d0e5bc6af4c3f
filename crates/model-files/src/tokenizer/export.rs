//! Writes a tokenizer as a folder that transformers and benchmark clients load.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};
use serving_core::ids::TokenId;

use super::added::AddedToken;
use super::cuts::SPACE_MARK;
use super::error::TokenizerError;
use super::folder::{FILES, read_file};
use super::merging::Merger;
use super::normalizer::Step;
use super::sentencepiece::SentencePiece;
use super::{Source, Tokenizer};

impl Tokenizer {
    /// Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json, and chat_template.jinja if there is a template.
    /// The files of a Hugging Face folder are copied as they are; those of a GGUF file are made from its metadata. Files of
    /// these names in `folder` are replaced; `folder` is made if it is missing.
    ///
    /// The library's BPE merges by ranks, so a SentencePiece vocabulary with tokens of equal score, with unused tokens, or with
    /// user-defined tokens beside a written space mark or an added space, gives other ids there in rare cases.
    ///
    /// # Errors
    /// [`TokenizerError::Write`]; [`TokenizerError::Io`] when a file to copy is gone.
    pub fn write_folder(&self, folder: &Path, chat_template: Option<&str>) -> Result<(), TokenizerError> {
        let write = |name: &str, content: &[u8]| {
            let path = folder.join(name);
            fs::write(&path, content).map_err(|cause| TokenizerError::Write { path, cause })
        };
        fs::create_dir_all(folder).map_err(|cause| TokenizerError::Write {
            path: folder.to_path_buf(),
            cause,
        })?;
        match &self.source {
            Source::Folder(from) => {
                for name in FILES {
                    if let Some(bytes) = read_file(&from.join(name))? {
                        write(name, &bytes)?;
                    }
                }
            }
            Source::Gguf => {
                let (config, map) = self.settings();
                for (name, value) in FILES.into_iter().zip([self.tokenizer_json()?, config, map]) {
                    write(name, format!("{value:#}\n").as_bytes())?;
                }
            }
        }
        match chat_template {
            Some(template) => write("chat_template.jinja", template.as_bytes()),
            None => Ok(()),
        }
    }

    fn text_of(&self, token: TokenId) -> String {
        String::from_utf8_lossy(self.token_bytes(token).unwrap_or_default()).into_owned()
    }

    /// tokenizer_config.json and special_tokens_map.json.
    fn settings(&self) -> (Value, Value) {
        let mut map = Map::new();
        let named = [("bos_token", self.special.begin), ("eos_token", self.special.main_end)];
        for (name, id) in named {
            if let Some(id) = id {
                map.insert(name.to_owned(), self.text_of(id).into());
            }
        }
        let mut config = map.clone();
        config.insert("add_bos_token".to_owned(), self.special.add_begin.into());
        config.insert("clean_up_tokenization_spaces".to_owned(), false.into());
        config.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
        (config.into(), map.into())
    }

    pub(super) fn tokenizer_json(&self) -> Result<Value, TokenizerError> {
        let encoder = &self.encoder;
        let mut added: Vec<_> = encoder.added.tokens().iter().collect();
        let (normalizer, decoder, model) = match &encoder.merger {
            Merger::Scores(model) => {
                added.extend(model.user_defined());
                self.parts_of_scores(model)
            }
            Merger::Bytes { bpe, .. } | Merger::Characters(bpe) => {
                let model = serde_json::to_value(bpe).map_err(|cause| TokenizerError::Build { cause: cause.into() })?;
                let decoder =
                    json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
                (
                    sequence("normalizers", encoder.normalizer.iter().map(step).collect()),
                    decoder,
                    model,
                )
            }
        };
        added.sort_unstable_by_key(|token| token.id);
        let added: Vec<_> = added.into_iter().map(|token| self.added_token(token)).collect();
        let mut words: Vec<_> = encoder
            .words
            .iter()
            .filter_map(|split| split.isolating_pattern())
            .map(|pattern| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}))
            .collect();
        if matches!(encoder.merger, Merger::Bytes { .. }) {
            words.push(
                json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
            );
        }
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": added,
            "normalizer": normalizer,
            "pre_tokenizer": sequence("pretokenizers", words),
            "post_processor": self.post_processor(),
            "decoder": decoder,
            "model": model,
        }))
    }

    fn added_token(&self, token: &AddedToken) -> Value {
        json!({
            "id": token.id.0, "content": token.text, "single_word": token.is_single_word,
            "lstrip": token.strips_left, "rstrip": token.strips_right,
            "normalized": false, "special": self.is_special(token.id),
        })
    }

    fn post_processor(&self) -> Value {
        let Some(begin) = self.special.begin.filter(|_| self.special.add_begin) else {
            return Value::Null;
        };
        let text = self.text_of(begin);
        let special = json!({"SpecialToken": {"id": text, "type_id": 0}});
        let first = json!({"Sequence": {"id": "A", "type_id": 0}});
        let second = json!({"Sequence": {"id": "B", "type_id": 1}});
        json!({
            "type": "TemplateProcessing",
            "single": [special, first],
            "pair": [special, first, special, second],
            "special_tokens": {&*text: {"id": text, "ids": [begin.0], "tokens": [text]}},
        })
    }

    /// Normalizer, decoder and model of a vocabulary with scores, as Hugging Face's converter makes them.
    fn parts_of_scores(&self, model: &SentencePiece) -> (Value, Value, Value) {
        let mark = SPACE_MARK.to_string();
        let mut normalizer = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": mark})];
        let mut decoder = vec![
            json!({"type": "Replace", "pattern": {"String": mark}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if model.adds_space {
            normalizer.insert(0, json!({"type": "Prepend", "prepend": mark}));
            decoder.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let mut vocabulary: Vec<(String, u32)> = Vec::new();
        vocabulary.extend(model.mergeable().into_iter().map(|(text, id)| (text.to_owned(), id)));
        let bytes = model.bytes().into_iter().flatten().enumerate();
        vocabulary.extend(bytes.map(|(byte, id)| (format!("<0x{byte:02X}>"), *id)));
        let control = self.encoder.added.tokens().iter();
        vocabulary.extend(control.map(|token| (token.text.clone(), token.id.0)));
        vocabulary.sort_unstable_by_key(|(_, id)| *id);
        let vocabulary: Map<String, Value> = vocabulary.into_iter().map(|(text, id)| (text, id.into())).collect();
        let bpe = json!({
            "type": "BPE", "dropout": null, "unk_token": model.unknown().map(|id| self.text_of(id)),
            "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": true, "byte_fallback": model.bytes().is_some(), "ignore_merges": false,
            "vocab": vocabulary,
            "merges": model.merges(),
        });
        (sequence("normalizers", normalizer), sequence("decoders", decoder), bpe)
    }
}

fn sequence(members: &str, mut parts: Vec<Value>) -> Value {
    match parts.len() {
        0 => Value::Null,
        1 => parts.remove(0),
        _ => json!({"type": "Sequence", members: parts}),
    }
}

fn step(step: &Step) -> Value {
    match step {
        Step::Prepend(prefix) => json!({"type": "Prepend", "prepend": prefix}),
        Step::Replace { from, to } => json!({"type": "Replace", "pattern": {"String": from}, "content": to}),
        Step::Unicode(form) => json!({"type": form.name()}),
    }
}
