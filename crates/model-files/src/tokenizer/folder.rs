//! The tokenizer of a Hugging Face folder: tokenizer.json as it stands, and the settings in the files beside it.

mod json;
mod parts;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serving_core::ids::TokenId;
use sha2::{Digest, Sha256};

use super::added::{AddedToken, AddedTokens};
use super::byte_level;
use super::control::ControlTexts;
use super::encoder::{Encoder, EncoderParts};
use super::error::TokenizerError;
use super::merging::{BpeSettings, Merger, build_bpe};
use super::sentencepiece::byte_of;
use super::special::{SpecialTokens, TokenKind};
use super::{Source, TokenTable, Tokenizer, VOCAB_MAX};
use json::{AddedTokenJson, BpeJson, GenerationJson, KindJson, MergeJson, SettingsJson, TokenizerJson};
use parts::PreTokenizer;

/// The files that decide ids, in the order in which their bytes are hashed, and that an export copies.
pub(super) const FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];

/// The settings beside tokenizer.json.
pub(super) struct Settings {
    config: SettingsJson,
    map: SettingsJson,
    /// End tokens of generation_config.json, or else of config.json.
    end: Vec<u64>,
    /// Rows of the embedding. Added tokens beyond them are not tokens of the model.
    rows: usize,
}

/// An added token with what its files say of it.
struct Added {
    token: AddedToken,
    is_normalized: bool,
    is_special: bool,
}

impl Tokenizer {
    /// Reads tokenizer.json (at most 64 MiB), tokenizer_config.json, special_tokens_map.json, generation_config.json and
    /// config.json (at most 16 MiB each). All but the first may be missing.
    ///
    /// # Errors
    /// [`TokenizerError`]: there is no tokenizer.json, a file is too large, damaged or contradicts another, or it asks for
    /// a model, a normalizer, a pre-tokenizer, a decoder or a setting that this build does not know.
    pub fn from_folder(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::for_rows(folder, VOCAB_MAX)
    }

    /// As [`Tokenizer::from_folder`], for a model with so many rows of embeddings. Added tokens beyond them, such as the one for
    /// images that the text models of Gemma 3 name, are not tokens of this model.
    pub(crate) fn for_rows(folder: &Path, rows: usize) -> Result<Tokenizer, TokenizerError> {
        let path = folder.join(FILES[0]);
        let bytes = json::read(&path, json::TOKENIZER_BYTES_MAX)?.ok_or_else(|| TokenizerError::NoTokenizerJson {
            folder: folder.to_path_buf(),
        })?;
        let settings = Settings {
            rows,
            ..Settings::read(folder)?
        };
        Tokenizer::from_json((&path, &bytes), &settings, folder)
    }

    /// The path of tokenizer.json, for errors, and its content; `folder` is where an export finds the files.
    pub(super) fn from_json(
        (path, bytes): (&Path, &[u8]),
        settings: &Settings,
        folder: &Path,
    ) -> Result<Tokenizer, TokenizerError> {
        let kind = json::parse::<KindJson>(path, bytes)?.model.kind;
        if let Some(found) = kind.filter(|kind| kind != "BPE") {
            return Err(TokenizerError::UnsupportedModel { found });
        }
        let file: TokenizerJson = json::parse(path, bytes)?;
        let mut tokenizer = build(&file, settings)?;
        let mut hasher = Sha256::new();
        hasher.update(Sha256::digest(bytes));
        let encoder = &tokenizer.encoder;
        let added = [encoder.added.tokens(), encoder.added_normalized.tokens()];
        hasher.update(format!("{:?} {added:?}", tokenizer.special));
        tokenizer.content_hash = hasher.finalize().into();
        tokenizer.source = Source::Folder(folder.to_path_buf());
        Ok(tokenizer)
    }
}

impl Settings {
    pub(super) fn read(folder: &Path) -> Result<Self, TokenizerError> {
        let generation: GenerationJson = json::settings(&folder.join("generation_config.json"))?;
        let end = match generation.eos_token_id {
            Some(end) => Some(end),
            None => json::settings::<GenerationJson>(&folder.join("config.json"))?.eos_token_id,
        };
        Ok(Settings {
            config: json::settings(&folder.join(FILES[1]))?,
            map: json::settings(&folder.join(FILES[2]))?,
            end: end.map(|end| end.ids().to_vec()).unwrap_or_default(),
            rows: VOCAB_MAX,
        })
    }

    /// The text of a special token, by the name that both files have for it.
    fn text(&self, field: impl Fn(&SettingsJson) -> Option<&json::TokenTextJson>) -> Option<&str> {
        field(&self.config).or_else(|| field(&self.map)).map(|text| text.text())
    }

    fn begin(&self) -> Option<&str> {
        self.text(|settings| settings.bos_token.as_ref())
    }

    fn end(&self) -> Option<&str> {
        self.text(|settings| settings.eos_token.as_ref())
    }

    fn named(&self) -> impl Iterator<Item = &str> {
        let unknown = self.text(|settings| settings.unk_token.as_ref());
        let padding = self.text(|settings| settings.pad_token.as_ref());
        [self.begin(), self.end(), unknown, padding].into_iter().flatten()
    }
}

fn build(file: &TokenizerJson, settings: &Settings) -> Result<Tokenizer, TokenizerError> {
    let model = &file.model;
    let mut added = added_tokens(file, settings)?;
    added.retain(|id, _| (*id as usize) < settings.rows);
    let texts = texts_by_id(model, &added)?;
    let normalizer = parts::normalizer(&file.normalizer)?;
    let PreTokenizer {
        words,
        is_byte_level,
        metaspace,
    } = {
        let pre_tokenizer = parts::pre_tokenizer(&file.pre_tokenizer, &normalizer)?;
        parts::check_decoder(&file.decoder, &pre_tokenizer)?;
        pre_tokenizer
    };
    let byte_fallback = model.byte_fallback.unwrap_or(false);
    let mut tokens = TokenTable {
        bytes: vec![Box::default(); texts.len()],
        kinds: vec![TokenKind::Unused; texts.len()],
    };
    for (id, text) in texts.iter().enumerate() {
        let Some(text) = text else { continue };
        let kind = match added.get(&(id as u32)) {
            Some(added) if added.is_special => TokenKind::Control,
            Some(_) => TokenKind::UserDefined,
            None if model.unk_token.as_deref() == Some(*text) => TokenKind::Unknown,
            None if byte_fallback && byte_of(text).is_some() => TokenKind::Byte,
            None => TokenKind::Normal,
        };
        tokens.kinds[id] = kind;
        tokens.bytes[id] = match (kind, byte_of(text)) {
            (TokenKind::Byte, Some(byte)) => Box::from([byte]),
            _ if is_byte_level => byte_level::token_bytes(text, kind),
            (TokenKind::Control | TokenKind::Unknown, _) => text.as_bytes().into(),
            // Also those that were added: Gemma has one for each run of spaces.
            _ => byte_level::without_marks(text),
        };
    }
    let special = special_tokens(file, settings, &texts, &tokens.kinds)?;
    let bpe = bpe(model)?;
    let merger = if is_byte_level {
        Merger::bytes(bpe)
    } else {
        Merger::Characters(bpe)
    };
    let (normalized, plain): (Vec<_>, Vec<_>) = added.into_values().partition(|added| added.is_normalized);
    let normalize = |mut added: Added| {
        added.token.text = super::normalizer::normalize(&normalizer, &added.token.text, true).into_owned();
        added.token
    };
    let normalized = AddedTokens::new(normalized.into_iter().map(normalize))?;
    Ok(Tokenizer {
        encoder: Encoder::new(EncoderParts {
            added: AddedTokens::new(plain.into_iter().map(|added| added.token))?,
            normalizer,
            added_normalized: normalized,
            metaspace,
            words,
            merger,
        }),
        control: ControlTexts::new(&tokens)?,
        tokens,
        special,
        content_hash: [0; 32],
        source: Source::Gguf,
    })
}

/// The added tokens of all files by id: those of tokenizer.json, then those of tokenizer_config.json, then the special
/// tokens that are in the vocabulary and nowhere added, as transformers does it.
fn added_tokens(file: &TokenizerJson, settings: &Settings) -> Result<BTreeMap<u32, Added>, TokenizerError> {
    let mut added = BTreeMap::new();
    let mut add = |id: u32, json: &AddedTokenJson| {
        added.entry(id).or_insert_with(|| Added {
            token: AddedToken {
                id: TokenId(id),
                text: json.content.clone(),
                strips_left: json.lstrip,
                strips_right: json.rstrip,
                is_single_word: json.single_word,
            },
            is_normalized: json.normalized,
            is_special: json.special,
        });
    };
    for token in &file.added_tokens {
        let id = token.id.or_else(|| file.model.vocab.get(&token.content).copied());
        let unknown = || TokenizerError::SpecialTokenUnknown {
            key: "added_tokens",
            token: token.content.clone(),
        };
        add(id.ok_or_else(unknown)?, token);
    }
    for (id, token) in &settings.config.added_tokens_decoder {
        let unknown = || TokenizerError::SpecialTokenUnknown {
            key: "added_tokens_decoder",
            token: token.content.clone(),
        };
        add(id.parse().map_err(|_| unknown())?, token);
    }
    for text in settings.named() {
        if let Some(&id) = file.model.vocab.get(text) {
            let token = AddedTokenJson {
                id: Some(id),
                content: text.to_owned(),
                single_word: false,
                lstrip: false,
                rstrip: false,
                normalized: false,
                special: true,
            };
            add(id, &token);
        }
    }
    Ok(added)
}

/// The text of each id; `None` for an id that no token has.
fn texts_by_id<'a>(
    model: &'a BpeJson,
    added: &'a BTreeMap<u32, Added>,
) -> Result<Vec<Option<&'a str>>, TokenizerError> {
    let in_model = model.vocab.iter().map(|(text, id)| (*id, text.as_str()));
    let in_added = added.iter().map(|(id, added)| (*id, added.token.text.as_str()));
    let last = model.vocab.values().chain(added.keys()).max();
    let size = last.map_or(0, |id| *id as usize + 1);
    if size == 0 || size > VOCAB_MAX {
        return Err(TokenizerError::VocabularySize {
            found: size,
            max: VOCAB_MAX,
        });
    }
    let mut texts = vec![None; size];
    for (id, text) in in_model.chain(in_added) {
        let place: &mut Option<&str> = &mut texts[id as usize];
        let is_elsewhere = model.vocab.get(text).is_some_and(|known| *known != id);
        if is_elsewhere || place.is_some_and(|known| known != text) {
            return Err(TokenizerError::DuplicateToken {
                id: id as usize,
                token: text.to_owned(),
            });
        }
        *place = Some(text);
    }
    Ok(texts)
}

fn bpe(model: &BpeJson) -> Result<tokenizers::models::bpe::BPE, TokenizerError> {
    let is_set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    for (key, is_unknown) in [
        ("dropout", model.dropout.is_some_and(|dropout| dropout != 0.0)),
        ("continuing_subword_prefix", is_set(&model.continuing_subword_prefix)),
        ("end_of_word_suffix", is_set(&model.end_of_word_suffix)),
    ] {
        if is_unknown {
            return Err(TokenizerError::UnsupportedSetting { key });
        }
    }
    let ids: HashMap<&str, u32> = model.vocab.iter().map(|(text, id)| (text.as_str(), *id)).collect();
    let merges = model.merges.iter().map(|merge| match merge {
        MergeJson::Pair(left, right) => Some((left.as_str(), right.as_str())),
        MergeJson::Joined(both) => both.split_once(' '),
    });
    let settings = BpeSettings {
        ignore_merges: model.ignore_merges.unwrap_or(false),
        byte_fallback: model.byte_fallback.unwrap_or(false),
        fuse_unk: model.fuse_unk.unwrap_or(false),
        unk_token: model.unk_token.clone(),
    };
    build_bpe(&ids, merges, &settings)
}

fn special_tokens(
    file: &TokenizerJson,
    settings: &Settings,
    texts: &[Option<&str>],
    kinds: &[TokenKind],
) -> Result<SpecialTokens, TokenizerError> {
    if settings.config.add_eos_token == Some(true) {
        return Err(TokenizerError::UnsupportedSetting { key: "add_eos_token" });
    }
    let find = |key: &'static str, text: Option<&str>| {
        let Some(text) = text else { return Ok(None) };
        let known = texts.iter().position(|known| *known == Some(text));
        let unknown = || TokenizerError::SpecialTokenUnknown {
            key,
            token: text.to_owned(),
        };
        known.map(|id| Some(TokenId(id as u32))).ok_or_else(unknown)
    };
    let inside = |key: &'static str, id: u64| match u32::try_from(id) {
        Ok(small) if (small as usize) < texts.len() => Ok(TokenId(small)),
        _ => Err(TokenizerError::SpecialIdOutsideVocabulary {
            key,
            id,
            vocab_size: texts.len(),
        }),
    };
    let in_template = match parts::begin_token(&file.post_processor)? {
        Some(id) => Some(inside("post_processor", id.0.into())?),
        None => None,
    };
    // Some folders name a begin token that they neither have nor add.
    let named_begin = find("bos_token", settings.begin()).ok().flatten();
    let (begin, add_begin) = match settings.config.add_bos_token {
        Some(add_begin) => (named_begin.or(in_template), add_begin),
        None => (in_template.or(named_begin), in_template.is_some()),
    };
    if add_begin && begin.is_none() {
        return Err(TokenizerError::UnsupportedSetting { key: "add_bos_token" });
    }
    let mut end: Vec<_> = find("eos_token", settings.end())?.into_iter().collect();
    for &id in &settings.end {
        end.push(inside("eos_token_id", id)?);
    }
    let texts = texts.iter().map(|text| text.unwrap_or_default());
    Ok(SpecialTokens::new(
        (begin, add_begin),
        end,
        texts.zip(kinds.iter().copied()),
    ))
}

/// The bytes of one of [`FILES`], for an export; `None` when the folder lacks it.
pub(super) fn read_file(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    json::read(path, json::TOKENIZER_BYTES_MAX)
}
