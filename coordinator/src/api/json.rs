//! Typed access to the fields of a JSON object. Each error names the field, the value that came and the value that is
//! wanted.

use serde_json::{Map, Number, Value};

use super::error::ApiError;

/// The object that a client sent. Null and absent mean the same.
#[derive(Debug)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Prefix of field names in messages, for example `messages[3].`.
    path: String,
}

impl<'a> Fields<'a> {
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Self {
            map,
            path: String::new(),
        }
    }
    pub fn nested(map: &'a Map<String, Value>, path: String) -> Self {
        Self { map, path }
    }
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }
    pub fn names(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.map
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, _)| name.as_str())
    }
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }
    pub fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.typed(name, "a string", Value::as_str)
    }
    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.typed(name, "an object", Value::as_object)
    }
    pub fn array(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.typed(name, "a list", Value::as_array)
    }

    /// A whole number from `low` to `high`; `10.0` counts as one, as in JSON Schema.
    pub fn integer(&self, name: &str, low: i64, high: i64) -> Result<Option<i64>, ApiError> {
        self.get(name)
            .map(|value| {
                whole(value)
                    .filter(|number| (low..=high).contains(number))
                    .ok_or_else(|| self.wrong(name, &format!("a whole number from {low} to {high}"), value))
            })
            .transpose()
    }
    pub fn u32(&self, name: &str, low: u32, high: u32) -> Result<Option<u32>, ApiError> {
        let number = self.integer(name, i64::from(low), i64::from(high))?;
        Ok(number.and_then(|number| u32::try_from(number).ok()))
    }
    pub fn float(&self, name: &str, low: f64, high: f64) -> Result<Option<f64>, ApiError> {
        self.get(name)
            .map(|value| {
                value
                    .as_f64()
                    .filter(|number| number.is_finite() && (low..=high).contains(number))
                    .ok_or_else(|| self.wrong(name, &format!("a number from {low} to {high}"), value))
            })
            .transpose()
    }

    /// The error for a value that is not `wanted`.
    pub fn wrong(&self, name: &str, wanted: &str, value: &Value) -> ApiError {
        let name = self.path(name);
        ApiError::invalid(&name, format!("`{name}` must be {wanted}, not {}.", describe(value)))
    }

    fn typed<T>(&self, name: &str, wanted: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, ApiError> {
        self.get(name)
            .map(|value| read(value).ok_or_else(|| self.wrong(name, wanted, value)))
            .transpose()
    }
}

/// The number as a whole number, when it is one and fits.
pub fn whole(value: &Value) -> Option<i64> {
    let number: &Number = value.as_number()?;
    number.as_i64().or_else(|| {
        let float = number.as_f64()?;
        // 2^53: above it not every whole number is a double, so the parsed number may differ from the client's.
        (float.fract() == 0.0 && float.abs() <= 9_007_199_254_740_992.0).then_some(float as i64)
    })
}

/// A value for a message: its kind, and the value itself when it is short.
pub fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) if text.len() <= 40 => format!("the string {text:?}"),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

/// Text of a client, cut to a length that a message may repeat.
pub fn short(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    match text.char_indices().nth(CHARS_MAX) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
