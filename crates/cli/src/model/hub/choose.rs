//! Which of a repository's files make up the model. A pure decision over their names, the same for the hub's list and for what
//! is in the cache.

/// The files of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub form: Form,
    /// In the order of the list; the parts of a split GGUF file in theirs.
    pub files: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// One GGUF file, or the parts of one.
    Gguf,
    /// A Hugging Face folder.
    Folder,
}

/// Why no model can be chosen. The choices are names that can stand behind the colon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoChoice {
    /// No weights that this program can read.
    NoModel,
    /// Several GGUF files, and the name does not say which one.
    Several { choices: Vec<String> },
    /// No GGUF file is called so.
    NotThere { choices: Vec<String> },
}

/// `wanted` is a GGUF file's name, or the word for a quantisation. Without one a repository with `config.json` and safetensors
/// is a folder, and else its only GGUF file is the model.
pub(super) fn choose<'a>(names: impl Iterator<Item = &'a str>, wanted: Option<&str>) -> Result<Chosen, NoChoice> {
    let names: Vec<&str> = names.collect();
    if wanted.is_none() {
        let files = folder_files(&names);
        if !files.is_empty() {
            return Ok(Chosen {
                form: Form::Folder,
                files,
            });
        }
    }
    let models = gguf_models(&names);
    let choices = || models.iter().map(|model| model[0].to_owned()).collect();
    let fits = |first: &str| match wanted {
        None => true,
        Some(file) if file.ends_with(".gguf") => first == file,
        Some(word) => has_word(first, word),
    };
    let mut fitting = models.iter().filter(|model| fits(model[0]));
    match (fitting.next(), fitting.next(), wanted) {
        (Some(model), None, _) => Ok(Chosen {
            form: Form::Gguf,
            files: model.iter().map(|&name| name.to_owned()).collect(),
        }),
        (Some(_), Some(_), _) => Err(NoChoice::Several { choices: choices() }),
        (None, _, Some(_)) if !models.is_empty() => Err(NoChoice::NotThere { choices: choices() }),
        (None, ..) => Err(NoChoice::NoModel),
    }
}

/// All models among these files: the folder, if it is one, and each GGUF file.
pub(super) fn models(names: &[&str]) -> Vec<Chosen> {
    let owned = |files: Vec<&str>| files.into_iter().map(str::to_owned).collect();
    let folder = Some(folder_files(names)).filter(|files| !files.is_empty());
    let folder = folder.map(|files| Chosen {
        form: Form::Folder,
        files,
    });
    let files = gguf_models(names).into_iter().map(|parts| Chosen {
        form: Form::Gguf,
        files: owned(parts),
    });
    folder.into_iter().chain(files).collect()
}

/// Configuration, tokenizer, template and weights. Other weights in the same repository (of other tools, of adapters) are left
/// out. Nothing without both a configuration and weights.
fn folder_files(names: &[&str]) -> Vec<String> {
    let is_top = |name: &&&str| !name.contains('/');
    let weights: Vec<&str> = names
        .iter()
        .filter(is_top)
        .copied()
        .filter(|name| is_weights(name))
        .collect();
    if weights.is_empty() || !names.contains(&"config.json") {
        return Vec::new();
    }
    let is_wanted = |name: &&&str| name.ends_with(".json") || name.ends_with(".jinja") || weights.contains(name);
    let files = names.iter().filter(is_top).filter(is_wanted);
    files.map(|&name| name.to_owned()).collect()
}

/// `model.safetensors`, or a shard of it.
fn is_weights(name: &str) -> bool {
    let stem = name.strip_suffix(".safetensors");
    stem.is_some_and(|stem| stem == "model" || part_of(stem).is_some_and(|part| part.stem == "model"))
}

/// The GGUF files, each with its parts in order. The image projectors that lie beside some models are no models.
fn gguf_models<'a>(names: &[&'a str]) -> Vec<Vec<&'a str>> {
    let mut models = Vec::new();
    for &name in names {
        let Some(stem) = name.strip_suffix(".gguf") else {
            continue;
        };
        if stem.rsplit('/').next().is_some_and(|file| file.starts_with("mmproj")) {
            continue;
        }
        let Some(part) = part_of(stem) else {
            models.push(vec![name]);
            continue;
        };
        if part.number != 1 {
            continue;
        }
        let of_same = |number: u32| {
            names.iter().copied().find(|other| {
                let other = other.strip_suffix(".gguf").and_then(part_of);
                other.is_some_and(|other| (other.stem, other.number, other.count) == (part.stem, number, part.count))
            })
        };
        // A model that lacks a part is not offered.
        if let Some(parts) = (1..=part.count).map(of_same).collect() {
            models.push(parts);
        }
    }
    models
}

struct Part<'a> {
    stem: &'a str,
    number: u32,
    count: u32,
}

/// `NAME-00002-of-00003` without its ending.
fn part_of(stem: &str) -> Option<Part<'_>> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let number_in = |text: &str| (text.len() == 5).then(|| text.parse::<u32>().ok()).flatten();
    Some(Part {
        stem,
        number: number_in(number)?,
        count: number_in(count)?,
    })
}

/// Whether the file's name has `word` between two characters that separate words, whatever the case.
fn has_word(name: &str, word: &str) -> bool {
    let (name, word) = (name.to_ascii_lowercase(), word.to_ascii_lowercase());
    let stem = name.strip_suffix(".gguf").unwrap_or(&name);
    let is_end = |byte: Option<&u8>| byte.is_none_or(|byte| matches!(byte, b'-' | b'.' | b'/'));
    let mut found = stem.match_indices(&word);
    found.any(|(at, _)| {
        let bytes = stem.as_bytes();
        is_end(at.checked_sub(1).map(|before| &bytes[before])) && is_end(bytes.get(at + word.len()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str], wanted: Option<&str>) -> Result<Chosen, NoChoice> {
        choose(names.iter().copied(), wanted)
    }

    fn files(names: &[&str], wanted: Option<&str>) -> Vec<String> {
        chosen(names, wanted).expect("a model").files
    }

    #[test]
    fn of_a_folder_only_what_the_model_needs_is_taken() {
        let names = [
            ".gitattributes",
            "README.md",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "consolidated.safetensors",
            "adapter_model.safetensors",
            "pytorch_model.bin",
            "onnx/model.onnx",
            "onnx/config.json",
            "original/model.safetensors",
        ];
        let taken = [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ];
        assert_eq!(files(&names, None), taken);
        assert_eq!(chosen(&names, None).map(|chosen| chosen.form), Ok(Form::Folder));
        assert_eq!(
            chosen(&["config.json", "pytorch_model.bin"], None),
            Err(NoChoice::NoModel)
        );
        assert_eq!(chosen(&["model.safetensors"], None), Err(NoChoice::NoModel));
    }

    #[test]
    fn a_gguf_file_is_named_by_its_file_or_by_its_quantisation() {
        let names = [
            "README.md",
            "m-Q4_K_M.gguf",
            "m-Q4_K_S.gguf",
            "m.Q8_0.gguf",
            "sub/m-F16.gguf",
            "mmproj-m-F16.gguf",
        ];
        assert_eq!(files(&names, Some("m-Q4_K_S.gguf")), ["m-Q4_K_S.gguf"]);
        assert_eq!(files(&names, Some("q4_k_m")), ["m-Q4_K_M.gguf"]);
        assert_eq!(files(&names, Some("Q8_0")), ["m.Q8_0.gguf"]);
        assert_eq!(files(&names, Some("F16")), ["sub/m-F16.gguf"]);
        let choices: Vec<String> = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.Q8_0.gguf", "sub/m-F16.gguf"]
            .map(String::from)
            .into();
        let several = NoChoice::Several {
            choices: choices.clone(),
        };
        assert_eq!(chosen(&names, None), Err(several));
        for unknown in ["Q4", "Q4_K", "Q6_K", "x.gguf", ""] {
            let not_there = NoChoice::NotThere {
                choices: choices.clone(),
            };
            assert_eq!(chosen(&names, Some(unknown)), Err(not_there), "{unknown:?}");
        }
        assert_eq!(files(&["only-one.gguf"], None), ["only-one.gguf"]);
    }

    #[test]
    fn a_split_file_is_one_model_and_without_a_part_none() {
        let names = [
            "b-Q8_0-00002-of-00002.gguf",
            "b-Q8_0-00001-of-00002.gguf",
            "a-Q4_0-00001-of-00002.gguf",
        ];
        let parts = ["b-Q8_0-00001-of-00002.gguf", "b-Q8_0-00002-of-00002.gguf"];
        assert_eq!(files(&names, None), parts);
        assert_eq!(files(&names, Some("Q8_0")), parts);
        assert_eq!(files(&names, Some(parts[0])), parts);
        // A count from outside decides no allocation: the first missing part ends the search.
        assert_eq!(chosen(&["c-00001-of-99999.gguf"], None), Err(NoChoice::NoModel));
    }
}
