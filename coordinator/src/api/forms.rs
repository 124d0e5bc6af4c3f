//! The forms in which a client writes the fields of a body. An error names the field, what came and what is wanted. No form
//! holds more memory than a few times its text, however many zeros a list has.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, Error, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};
use serving_core::ids::TokenId;

use super::error::ApiError;

/// Reads a body, or names the field that is wrong.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, ApiError> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let read = serde_path_to_error::deserialize::<_, Object<T>>(&mut reader);
    let object = read.map_err(|error| {
        let (path, inner) = (error.path().to_string(), error.inner());
        if !inner.is_data() || path == "." {
            return unreadable(inner);
        }
        let words = format!("`{}`: {}.", short(&path), middle_out(&inner.to_string()));
        ApiError::invalid(parameter(&path), words)
    })?;
    reader.end().map_err(|error| unreadable(&error))?;
    Ok(object.0)
}

/// The error of a body that is no JSON, or no object.
pub fn unreadable(error: &serde_json::Error) -> ApiError {
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

/// Text of a client, cut to a length that a message may repeat.
pub fn short(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    match text.char_indices().nth(CHARS_MAX) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

/// An object. (A derived struct alone would take a list of its values as well.)
#[derive(Debug)]
pub struct Object<T>(pub T);

struct ObjectVisitor<T>(std::marker::PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = T;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_map(ObjectVisitor(std::marker::PhantomData))
            .map(Self)
    }
}

/// A list of at most `MOST` elements. Reading ends with the first element beyond them.
#[derive(Debug)]
pub struct List<T, const MOST: usize>(pub Vec<T>);

impl<T, const MOST: usize> Default for List<T, MOST> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

struct ListVisitor<T, const MOST: usize>(std::marker::PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for ListVisitor<T, MOST> {
    type Value = List<T, MOST>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MOST}")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(element) = elements.next_element()? {
            if list.len() == MOST {
                return Err(A::Error::invalid_length(MOST + 1, &self));
            }
            list.push(element);
        }
        Ok(List(list))
    }
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for List<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListVisitor(std::marker::PhantomData))
    }
}

/// Lets a visitor take whole numbers as doubles.
macro_rules! visit_whole_numbers {
    () => {
        fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Self::Value, E> {
            self.visit_f64(number as f64)
        }
        fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Self::Value, E> {
            self.visit_f64(number as f64)
        }
    };
}
pub(crate) use visit_whole_numbers;

/// A number in a range. All ranges end below 2^53, so a double holds each whole number of them. `10.0` is a whole number, as
/// in JSON Schema.
pub struct Range {
    what: &'static str,
    is_whole: bool,
    low: f64,
    high: f64,
}

pub const TOKEN_ID: Range = Range {
    what: "a token id",
    ..Range::whole(0, u32::MAX as i64)
};

impl Range {
    pub const fn whole(low: i64, high: i64) -> Self {
        Self {
            what: "a whole number",
            is_whole: true,
            low: low as f64,
            high: high as f64,
        }
    }
}

impl Visitor<'_> for Range {
    type Value = f64;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} from {} to {}", self.what, self.low, self.high)
    }
    fn visit_f64<E: Error>(self, number: f64) -> Result<f64, E> {
        if (!self.is_whole || number.fract() == 0.0) && (self.low..=self.high).contains(&number) {
            return Ok(number);
        }
        Err(E::invalid_value(Unexpected::Other(&number.to_string()), &self))
    }
    visit_whole_numbers!();
}

/// A whole number in a range.
#[derive(Clone, Copy, Debug)]
pub struct Whole<const LOW: i64, const HIGH: i64>(i64);

impl<const LOW: i64, const HIGH: i64> Whole<LOW, HIGH> {
    pub fn get(self) -> u32 {
        u32::try_from(self.0).unwrap_or(0)
    }
}

impl<'de, const LOW: i64, const HIGH: i64> Deserialize<'de> for Whole<LOW, HIGH> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_any(Range::whole(LOW, HIGH))
            .map(|number| Self(number as i64))
    }
}

pub type Count = Whole<0, { u32::MAX as i64 }>;

/// A number in a range.
#[derive(Clone, Copy, Debug)]
pub struct Real<const LOW: i32, const HIGH: i32>(pub f32);

impl<'de, const LOW: i32, const HIGH: i32> Deserialize<'de> for Real<LOW, HIGH> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let range = Range {
            what: "a number",
            is_whole: false,
            ..Range::whole(LOW.into(), HIGH.into())
        };
        deserializer.deserialize_any(range).map(|number| Self(number as f32))
    }
}

/// A token id. Its vocabulary is looked at later.
#[derive(Clone, Copy, Debug)]
pub struct Id(pub TokenId);

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_any(TOKEN_ID)
            .map(|id| Self(TokenId(id as u32)))
    }
}

/// Implements `Deserialize` by a visitor that is the type's default value.
macro_rules! read_by_visitor {
    ($($form:ty),*) => {$(
        impl<'de> serde::Deserialize<'de> for $form {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(Self::default())
            }
        }
    )*};
}
pub(crate) use read_by_visitor;

/// True, false or null, which is false.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flag(pub bool);

impl Visitor<'_> for Flag {
    type Value = Self;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("true or false")
    }
    fn visit_bool<E>(self, value: bool) -> Result<Self, E> {
        Ok(Self(value))
    }
    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(Self(false))
    }
}

/// Signed and unsigned 64-bit numbers are both seeds. A negative one is taken by its bits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seed(pub u64);

impl Visitor<'_> for Seed {
    type Value = Self;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number of at most 64 bits")
    }
    fn visit_u64<E>(self, seed: u64) -> Result<Self, E> {
        Ok(Self(seed))
    }
    fn visit_i64<E>(self, seed: i64) -> Result<Self, E> {
        Ok(Self(seed.cast_unsigned()))
    }
}

read_by_visitor!(Flag, Seed, Hint);

/// The value of a field, as far as it decides whether a client that sends an unsupported field asks for anything: null, true,
/// false, a number or a short string as it is, `[]` for an empty list, `{text}` for an object of type text.
#[derive(Default)]
struct Hint(String);

impl<'de> Visitor<'de> for Hint {
    type Value = Self;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }
    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(Self("null".to_owned()))
    }
    fn visit_bool<E>(self, value: bool) -> Result<Self, E> {
        Ok(Self(value.to_string()))
    }
    fn visit_f64<E: Error>(self, number: f64) -> Result<Self, E> {
        Ok(Self(number.to_string()))
    }
    visit_whole_numbers!();
    fn visit_str<E>(self, text: &str) -> Result<Self, E> {
        Ok(Self(short(text)))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self, A::Error> {
        let mut hint = "[]";
        while elements.next_element::<IgnoredAny>()?.is_some() {
            hint = "a list";
        }
        Ok(Self(hint.to_owned()))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self, A::Error> {
        let mut hint = "an object".to_owned();
        while let Some((name, Hint(value))) = entries.next_entry::<String, Hint>()? {
            if name == "type" {
                hint = format!("{{{value}}}");
            }
        }
        Ok(Self(hint))
    }
}

/// Looks at each field of an object: its name and a hint of its value.
struct EachField<'a>(&'a mut dyn FnMut(&str, &str) -> Result<(), ApiError>);

impl<'de> Visitor<'de> for EachField<'_> {
    type Value = Result<(), ApiError>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut verdict = Ok(());
        while let Some((name, Hint(value))) = entries.next_entry::<String, Hint>()? {
            verdict = verdict.and_then(|()| (self.0)(&name, &value));
        }
        Ok(verdict)
    }
}

/// Reads all of a body. Then returns the first error of `check`.
pub fn each_field(text: &str, mut check: impl FnMut(&str, &str) -> Result<(), ApiError>) -> Result<(), ApiError> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let read = reader.deserialize_map(EachField(&mut check));
    let read = read.and_then(|verdict| reader.end().map(|()| verdict));
    read.map_err(|error| unreadable(&error))?
}

/// The names of a derived struct's fields.
pub fn field_names<T: DeserializeOwned>() -> &'static [&'static str] {
    let mut names: &[&str] = &[];
    let _ = T::deserialize(FieldNames(&mut names));
    names
}

/// A deserializer that reads nothing: it notes the names that the struct asks for.
struct FieldNames<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for FieldNames<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(Error::custom("not a struct"))
    }
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = fields;
        Err(Error::custom("only its names are wanted"))
    }
    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    struct Fields {
        list: Option<List<Count, 2>>,
        flag: Flag,
        object: Option<Object<std::collections::BTreeMap<String, u32>>>,
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
        assert_eq!(field_names::<Fields>(), ["list", "flag", "object"]);
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
            message.len() < 400 && message.contains("expected true or false"),
            "{message}"
        );
        assert_eq!(wrong(r#"{"flag": tru"#).0, None);
    }

    #[test]
    fn each_field_is_looked_at_and_the_whole_text_is_read() {
        let mut seen = Vec::new();
        let text = r#"{"a": [], "b": [0], "c": {"type": "text"}, "d": 1, "e": "none"}"#;
        let verdict = each_field(text, |name, value| {
            seen.push(format!("{name} {value}"));
            Ok(())
        });
        assert_eq!(verdict, Ok(()));
        assert_eq!(seen, ["a []", "b a list", "c {text}", "d 1", "e none"]);
        let refused = each_field(r#"{"a": 1, "b": "#, |name, _| Err(ApiError::unsupported(name)));
        assert_eq!(refused.expect_err("no JSON").param, None);
    }
}
