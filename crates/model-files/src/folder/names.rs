//! Names of tensors in folders and in GGUF files.

use crate::arch::{Architecture, in_layer};

/// What stands in front of the tensors of a layer in folders.
const LAYERS: &str = "model.layers.";

pub(super) struct Translator {
    architecture: &'static Architecture,
    /// The model for text is a part of one that also reads images.
    is_nested: bool,
}

impl Translator {
    pub(super) fn new(architecture: &'static Architecture, is_nested: bool) -> Self {
        Translator {
            architecture,
            is_nested,
        }
    }

    /// Tensors that play no part in computing text: tables that old versions of transformers saved, and the parts for images.
    pub(super) fn ignores(&self, name: &str) -> bool {
        const OF_IMAGES: [&str; 2] = ["vision_tower.", "multi_modal_projector."];
        let rest = name.strip_prefix("model.").unwrap_or(name);
        name.ends_with(".rotary_emb.inv_freq")
            || self.is_nested && OF_IMAGES.iter().any(|prefix| rest.starts_with(prefix))
    }

    pub(super) fn to_gguf(&self, name: &str) -> Option<String> {
        let plain = self.without_place(name);
        let Some(rest) = plain.strip_prefix(LAYERS) else {
            return self.known(&plain).map(str::to_owned);
        };
        let (layer, tensor) = rest.split_once('.')?;
        let number: usize = layer.parse().ok()?;
        // Another way to write the number, such as 01, would be a second name of the same tensor.
        if number.to_string() != layer {
            return None;
        }
        Some(in_layer(number, self.known(tensor)?))
    }

    /// The name in folders, for error messages.
    pub(super) fn to_folder(&self, name: &str) -> String {
        let (place, tensor) = match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, tensor)) => (format!("{LAYERS}{layer}."), tensor),
            None => (String::new(), name),
        };
        let pairs = self.architecture.folder_names.iter();
        let known = pairs.clone().find(|(gguf, _)| *gguf == tensor);
        known.map_or_else(|| name.to_owned(), |(_, folder)| format!("{place}{folder}"))
    }

    fn known(&self, folder_name: &str) -> Option<&'static str> {
        let mut pairs = self.architecture.folder_names.iter();
        pairs.find(|(_, name)| *name == folder_name).map(|(gguf, _)| *gguf)
    }

    /// The name that the tensor has in a folder of the model for text alone. Two generations of transformers put it at
    /// different places.
    fn without_place(&self, name: &str) -> String {
        if self.is_nested {
            if let Some(rest) = name.strip_prefix("model.language_model.") {
                return format!("model.{rest}");
            }
            if let Some(rest) = name.strip_prefix("language_model.") {
                return rest.to_owned();
            }
        }
        name.to_owned()
    }
}
