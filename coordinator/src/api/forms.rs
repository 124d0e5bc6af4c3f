//! The forms in which a client writes the fields of a body. An error names the field, what came and what is wanted. No form
//! holds more memory than a few times its text, however many zeros a list has: JSON that is handed on stays text (`json_tree` reads it
//! where a template needs it).

use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeOwned, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serving_core::ids::TokenId;
use sha2::{Digest as _, Sha256};

use super::error::{ApiError, UNSUPPORTED, short};

/// Reads a body, or names the field that is wrong.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, ApiError> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let read = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let (path, inner) = (error.path().to_string(), error.inner());
        if !inner.is_data() || path == "." {
            return unreadable(inner);
        }
        let (parameter, words) = (parameter(&path), inner.to_string());
        match words.contains(UNSUPPORTED) {
            true => ApiError::unsupported(parameter),
            false => ApiError::invalid(parameter, format!("`{}`: {}.", short(&path), middle_out(&words))),
        }
    });
    read.and_then(|read| reader.end().map(|()| read).map_err(|error| unreadable(&error)))
}

/// The error of a body that is no JSON, or no object.
fn unreadable(error: &serde_json::Error) -> ApiError {
    let what = if error.is_data() {
        "must be a JSON object"
    } else {
        "is not valid JSON"
    };
    ApiError::bad_request(format!("The request body {what}: {}.", middle_out(&error.to_string())))
}

/// The `param` of an error. The elements of a list are not parameters of their own, unless they have fields.
fn parameter(path: &str) -> &str {
    match path.contains('.') && !path.starts_with("logit_bias") {
        true => path,
        false => path.split(['[', '.']).next().unwrap_or(path),
    }
}

/// A message that quotes a long text of the client is cut in the middle: what was wanted stands at its end.
fn middle_out(text: &str) -> String {
    const ENDS: (usize, usize) = (100, 150);
    let chars = text.chars().count();
    if chars <= ENDS.0 + ENDS.1 {
        return text.to_owned();
    }
    let (head, tail): (String, String) = (
        text.chars().take(ENDS.0).collect(),
        text.chars().skip(chars - ENDS.1).collect(),
    );
    format!("{head}...{tail}")
}

/// A JSON value. The elements of a list have a type.
#[derive(Debug)]
pub enum Given<T> {
    Null,
    Bool(bool),
    /// A whole number of up to 64 bits, with its bits.
    Whole(f64, u64),
    Real(f64),
    Text(String),
    List(Vec<T>),
    Object,
}

impl<'de, T: Deserialize<'de>> Given<T> {
    /// Reads a value. Reading ends with the first element beyond `most`. `wanted` is for messages.
    pub fn read<D: Deserializer<'de>>(
        deserializer: D,
        wanted: &dyn fmt::Display,
        most: usize,
    ) -> Result<Self, D::Error> {
        deserializer.deserialize_any(GivenVisitor {
            wanted,
            most,
            elements: PhantomData,
        })
    }

    /// The error for a value that is not what was wanted.
    pub fn is_not<E: Error>(&self, wanted: &dyn fmt::Display) -> E {
        let given = match self {
            Self::Null => "null".to_owned(),
            Self::Bool(value) => value.to_string(),
            Self::Whole(number, _) | Self::Real(number) => number.to_string(),
            Self::Text(text) => format!("the string {:?}", short(text)),
            Self::List(_) => "a list".to_owned(),
            Self::Object => "an object".to_owned(),
        };
        E::custom(format!("must be {wanted}, not {given}"))
    }

    /// A number in a range. All ranges end below 2^53, so a double holds each whole number of them.
    pub fn within(&self, low: f64, high: f64) -> Option<f64> {
        let (Self::Whole(number, _) | Self::Real(number)) = self else {
            return None;
        };
        (low..=high).contains(number).then_some(*number)
    }

    /// The same for whole numbers. `10.0` is one, as in JSON Schema.
    pub fn whole_within(&self, low: i64, high: i64) -> Option<i64> {
        let number = self.within(low as f64, high as f64)?;
        (number.fract() == 0.0).then_some(number as i64)
    }

    /// Whether it is one of these words.
    fn is_text(&self, words: &[&str]) -> Option<()> {
        matches!(self, Self::Text(text) if words.contains(&text.as_str())).then_some(())
    }

    pub fn token_id(&self) -> Option<TokenId> {
        self.whole_within(0, u32::MAX.into()).map(|id| TokenId(id as u32))
    }
}

struct GivenVisitor<'a, T> {
    wanted: &'a dyn fmt::Display,
    most: usize,
    elements: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for GivenVisitor<'_, T> {
    type Value = Given<T>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.wanted.fmt(f)
    }
    fn visit_unit<E>(self) -> Result<Given<T>, E> {
        Ok(Given::Null)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Given<T>, E> {
        Ok(Given::Bool(value))
    }
    fn visit_u64<E>(self, number: u64) -> Result<Given<T>, E> {
        Ok(Given::Whole(number as f64, number))
    }
    fn visit_i64<E>(self, number: i64) -> Result<Given<T>, E> {
        Ok(Given::Whole(number as f64, number.cast_unsigned()))
    }
    fn visit_f64<E>(self, number: f64) -> Result<Given<T>, E> {
        Ok(Given::Real(number))
    }
    fn visit_str<E>(self, text: &str) -> Result<Given<T>, E> {
        Ok(Given::Text(text.to_owned()))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Given<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(element) = elements.next_element()? {
            if list.len() == self.most {
                return Err(A::Error::invalid_length(self.most + 1, &self));
            }
            list.push(element);
        }
        Ok(Given::List(list))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Given<T>, A::Error> {
        while let Some((IgnoredAny, IgnoredAny)) = entries.next_entry()? {}
        Ok(Given::Object)
    }
}

/// A list of at most `MOST` elements.
#[derive(Debug)]
pub struct List<T, const MOST: usize>(pub Vec<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for List<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wanted = format_args!("a list of at most {MOST}");
        match Given::read(deserializer, &wanted, MOST)? {
            Given::List(list) => Ok(Self(list)),
            other => Err(other.is_not(&wanted)),
        }
    }
}

/// Types that are no list.
macro_rules! scalar_forms {
    ($($(#[$doc:meta])* $form:ident$([$(const $bound:ident: $kind:ty),+])? ($inner:ty) is $wanted:expr, by $read:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $form$(<$(const $bound: $kind),+>)?(pub $inner);

        impl<'de$($(, const $bound: $kind)+)?> Deserialize<'de> for $form$(<$($bound),+>)? {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let wanted = $wanted;
                let given = Given::<IgnoredAny>::read(deserializer, &wanted, usize::MAX)?;
                let read: fn(&Given<IgnoredAny>) -> Option<$inner> = $read;
                read(&given).map(Self).ok_or_else(|| given.is_not(&wanted))
            }
        }
    )*};
}

scalar_forms! {
    /// True, false or null, which is false.
    #[derive(Default)]
    Flag(bool) is "true or false", by |given| match given {
        Given::Null => Some(false),
        Given::Bool(value) => Some(*value),
        _ => None,
    };
    /// A whole number in a range.
    Whole[const LOW: i64, const HIGH: i64](i64) is format_args!("a whole number from {LOW} to {HIGH}"),
        by |given| given.whole_within(LOW, HIGH);
    /// A number in a range.
    Real[const LOW: i32, const HIGH: i32](f32) is format_args!("a number from {LOW} to {HIGH}"),
        by |given| given.within(LOW.into(), HIGH.into()).map(|number| number as f32);
    /// A token id. Its vocabulary is looked at later.
    Id(TokenId) is "a token id", by Given::token_id;
    /// Signed and unsigned 64-bit numbers are both seeds. A negative one is taken by its bits.
    Seed(u64) is "a whole number of at most 64 bits", by |given| match given {
        Given::Whole(_, bits) => Some(*bits),
        _ => None,
    };
    /// A text, of which only the hash is kept.
    CacheSalt([u8; 32]) is "a text that is not empty", by |given| match given {
        Given::Text(text) if !text.is_empty() => Some(Sha256::digest(text).into()),
        _ => None,
    };
    Unsupported(()) is UNSUPPORTED, by |_| None;
    // SDKs and frameworks send unsupported fields with values that ask for what this server does anyway.
    OnlyFlag[const VALUE: bool](()) is UNSUPPORTED,
        by |given| matches!(given, Given::Bool(value) if *value == VALUE).then_some(());
    OnlyNumber[const VALUE: i64](()) is UNSUPPORTED, by |given| given.whole_within(VALUE, VALUE).map(|_| ());
    EmptyText(()) is UNSUPPORTED, by |given| matches!(given, Given::Text(text) if text.is_empty()).then_some(());
    DisabledWord(()) is UNSUPPORTED, by |given| given.is_text(&["disabled"]);
    AutoWord(()) is UNSUPPORTED, by |given| given.is_text(&["auto", "default"]);
    EmptyList(()) is UNSUPPORTED, by |given| matches!(given, Given::List(list) if list.is_empty()).then_some(());
    NoToolChoice(()) is UNSUPPORTED, by |given| given.is_text(&["none", "auto"]);
}

pub type Count = Whole<0, { u32::MAX as i64 }>;

impl<const LOW: i64, const HIGH: i64> Whole<LOW, HIGH> {
    /// The number; 0 where it is below.
    pub fn get(self) -> u32 {
        u32::try_from(self.0).unwrap_or(0)
    }
}

/// A struct whose fields are known by name.
macro_rules! with_field_names {
    ($(#[$attribute:meta])* pub struct $name:ident { $($(#[$doc:meta])* $visibility:vis $field:ident: $type:ty,)* }) => {
        $(#[$attribute])*
        pub struct $name { $($(#[$doc])* $visibility $field: $type,)* }

        impl $name {
            pub const FIELD_NAMES: &[&str] = &[$(stringify!($field)),*];
        }
    };
}
pub(super) use with_field_names;

struct EachName<'a>(&'a mut dyn FnMut(&str));

impl<'de> Visitor<'de> for EachName<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        while let Some((name, IgnoredAny)) = entries.next_entry::<String, _>()? {
            (self.0)(&name);
        }
        Ok(())
    }
}

/// Looks at the name of each field. The whole text is read, so that a text that is no JSON is told from a wrong field.
pub fn each_name(text: &str, mut look: impl FnMut(&str)) -> Result<(), ApiError> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let read = reader.deserialize_map(EachName(&mut look)).and_then(|()| reader.end());
    read.map_err(|error| unreadable(&error))
}

/// Checks token ids against the vocabulary. `name` is the list's name in messages.
pub fn in_vocabulary(ids: Vec<Id>, name: &str, vocab_size: u32) -> Result<Vec<TokenId>, ApiError> {
    if let Some(at) = ids.iter().position(|id| id.0.0 >= vocab_size) {
        let (most, wrong) = (vocab_size - 1, ids[at].0);
        let top = name.split('[').next().unwrap_or(name);
        let message = format!("`{name}[{at}]` must be a token id from 0 to {most}, not {wrong}.");
        return Err(ApiError::invalid(top, message));
    }
    Ok(ids.into_iter().map(|id| id.0).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    struct Fields {
        list: Option<List<Count, 2>>,
        flag: Flag,
        object: Option<std::collections::BTreeMap<String, u32>>,
    }

    fn wrong(text: &str) -> (Option<String>, String) {
        let error = read::<Fields>(text).expect_err("it is wrong");
        (error.param, error.message)
    }

    #[test]
    fn null_is_absent_and_what_is_no_field_is_not_read() {
        let deep = "[".repeat(1000) + &"]".repeat(1000);
        let text = format!(r#"{{"flag": null, "list": [1, 2.0], "other": {deep}}}"#);
        let fields: Fields = read(&text).expect("fits");
        assert!(!fields.flag.0);
        assert_eq!(fields.list.map(|list| list.0.len()), Some(2));
    }

    #[test]
    fn an_error_names_its_field_and_repeats_no_long_text() {
        assert_eq!(wrong(r#"{"list": [1, 2, 3]}"#).0.as_deref(), Some("list"));
        assert_eq!(wrong(r#"{"list": [1, -2]}"#).0.as_deref(), Some("list"));
        assert_eq!(wrong(r#"{"object": {"a": true}}"#).0.as_deref(), Some("object.a"));
        assert_eq!(wrong(r#"{"object": [["a", 1]]}"#).0.as_deref(), Some("object"));
        let (param, message) = wrong(&format!(r#"{{"flag": "{}"}}"#, "x".repeat(100_000)));
        assert_eq!(param.as_deref(), Some("flag"));
        assert!(
            message.len() < 400 && message.contains("must be true or false"),
            "{message}"
        );
        assert_eq!(wrong(r#"{"flag": tru"#).0, None);
    }

    #[test]
    fn each_name_is_looked_at_and_the_whole_text_is_read() {
        let mut seen = Vec::new();
        let text = r#"{"a": [[0]], "b": {"type": "text"}}"#;
        assert_eq!(each_name(text, |name| seen.push(name.to_owned())), Ok(()));
        assert_eq!(seen, ["a", "b"]);
        let cut = each_name(r#"{"a": 1, "b": "#, |_| ());
        assert_eq!(cut.expect_err("no JSON").param, None);
    }
}
