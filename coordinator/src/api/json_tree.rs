//! JSON of a client as a tree of values, for a chat template. A tree takes up to 170 times its text, so it is made by the thread that
//! runs the template, and the trees of a request have a limited number of values together.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Makes the trees of one request.
#[derive(Debug)]
pub struct Trees {
    values_left: usize,
    has_too_many: bool,
}

/// A request has more values than it may.
#[derive(Debug, PartialEq, Eq)]
pub struct TooManyValues;

impl Trees {
    pub fn new(values_max: usize) -> Self {
        Self {
            values_left: values_max,
            has_too_many: false,
        }
    }

    /// The object that a text is. `None`: it is no JSON, or another value.
    pub fn object(&mut self, text: &str) -> Result<Option<Value>, TooManyValues> {
        if !text.trim_start().starts_with('{') {
            return Ok(None);
        }
        let mut reader = serde_json::Deserializer::from_str(text);
        let read = OneValue(self).deserialize(&mut reader);
        match read.and_then(|value| reader.end().map(|()| value)) {
            Ok(value) => Ok(Some(value)),
            Err(_) if self.has_too_many => Err(TooManyValues),
            Err(_) => Ok(None),
        }
    }

    fn take<E: Error>(&mut self) -> Result<(), E> {
        match self.values_left.checked_sub(1) {
            Some(left) => {
                self.values_left = left;
                Ok(())
            }
            None => {
                self.has_too_many = true;
                Err(E::custom("too many values"))
            }
        }
    }
}

/// Reads a value. serde_json's own reader also unpacks JSON that is hidden in a string (its `RawValue`), which would be values that
/// nobody counted.
struct OneValue<'a>(&'a mut Trees);

impl<'de> DeserializeSeed<'de> for OneValue<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.0.take::<D::Error>()?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for OneValue<'_> {
    type Value = Value;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::from(value))
    }
    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(Value::from(number))
    }
    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(Value::from(number))
    }
    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(Value::from(number))
    }
    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::from(text))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(element) = elements.next_element_seed(OneValue(self.0))? {
            list.push(element);
        }
        Ok(Value::Array(list))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = entries.next_key::<String>()? {
            let value = entries.next_value_seed(OneValue(self.0))?;
            fields.insert(name, value);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_object_is_read_as_serde_json_reads_it_and_another_value_is_none() {
        let text = r#" {"b": [1, -2, 1.5, "x\n", true, null], "a": {"": {}}, "b": [] } "#;
        let wanted: Value = serde_json::from_str(text).expect("JSON");
        let mut trees = Trees::new(1000);
        assert_eq!(trees.object(text), Ok(Some(wanted)));
        let deep = format!("{{\"a\": {}{}}}", "[".repeat(1000), "]".repeat(1000));
        for other in ["[1]", "7", "\"{}\"", "", "{", "{} {}", "{\"a\": 1e999}", &deep] {
            assert_eq!(trees.object(other), Ok(None), "{other:.20}");
        }
    }

    #[test]
    fn all_values_of_a_request_count_together() {
        let mut trees = Trees::new(5);
        assert_eq!(
            trees.object(r#"{"a": [0]}"#),
            Ok(Some(json!({"a": [0]}))),
            "three values"
        );
        assert_eq!(trees.object(r#"{"a": [0]}"#), Err(TooManyValues));
        assert_eq!(Trees::new(2).object(r#"{"a": 1}"#), Ok(Some(json!({"a": 1}))));
    }

    #[test]
    fn what_is_hidden_in_a_string_stays_a_string() {
        let hidden = r#"{"$serde_json::private::RawValue": "[[0],[0],[0]]"}"#;
        let read = Trees::new(2).object(hidden).expect("two values").expect("an object");
        assert_eq!(read["$serde_json::private::RawValue"], "[[0],[0],[0]]");
    }
}
