//! JSON whose size in memory is limited while it is read. Without the limit a list of zeros would take 35 times the size of
//! its text.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::limits::{COUNTED_CONTEXTS, JSON_LIST_MAX, JSON_VALUES_MAX, PROMPTS_MAX};

/// A limit that a body has passed. Reading stops there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excess {
    /// A list in `prompt` has far more elements than the context has tokens.
    Prompt,
    List,
    Values,
}

#[derive(Debug)]
pub enum JsonError {
    Syntax(serde_json::Error),
    Excess(Excess),
}

/// Reads one value. serde_json stops at 128 levels of nesting, so no body can overflow the stack.
pub fn read(text: &str, context_tokens: u32) -> Result<Value, JsonError> {
    let bounds = Bounds {
        prompt_list_max: prompt_list_max(context_tokens as usize),
        values_left: Cell::new(JSON_VALUES_MAX),
        excess: Cell::new(None),
    };
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = Bounded {
        bounds: &bounds,
        place: Place::Top,
    }
    .deserialize(&mut reader);
    match value.and_then(|value| reader.end().map(|()| value)) {
        Ok(value) => Ok(value),
        Err(error) => Err(bounds.excess.get().map_or(JsonError::Syntax(error), JsonError::Excess)),
    }
}

/// The number of elements that are counted for the refusal of a prompt that is too long. A long context alone may need
/// more.
fn prompt_list_max(context_tokens: usize) -> usize {
    let counted = (context_tokens * COUNTED_CONTEXTS).min(JSON_LIST_MAX);
    counted.max(context_tokens).max(PROMPTS_MAX + 1)
}

struct Bounds {
    prompt_list_max: usize,
    values_left: Cell<usize>,
    excess: Cell<Option<Excess>>,
}

impl Bounds {
    fn passed<E: Error>(&self, excess: Excess) -> E {
        self.excess.set(Some(excess));
        E::custom("too much")
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Top,
    InPrompt,
    Elsewhere,
}

struct Bounded<'a> {
    bounds: &'a Bounds,
    place: Place,
}

impl<'de> DeserializeSeed<'de> for Bounded<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let left = self.bounds.values_left.get();
        if left == 0 {
            return Err(self.bounds.passed(Excess::Values));
        }
        self.bounds.values_left.set(left - 1);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Bounded<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }
    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }
    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value, A::Error> {
        let (most, excess) = match self.place {
            Place::InPrompt => (self.bounds.prompt_list_max, Excess::Prompt),
            Place::Top | Place::Elsewhere => (JSON_LIST_MAX, Excess::List),
        };
        let mut list = Vec::new();
        while let Some(value) = elements.next_element_seed(Bounded {
            bounds: self.bounds,
            place: self.place,
        })? {
            if list.len() == most {
                return Err(self.bounds.passed(excess));
            }
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let place = match (self.place, key.as_str()) {
                (Place::Top, "prompt") => Place::InPrompt,
                (Place::InPrompt, _) => Place::InPrompt,
                (Place::Top | Place::Elsewhere, _) => Place::Elsewhere,
            };
            let value = entries.next_value_seed(Bounded {
                bounds: self.bounds,
                place,
            })?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn excess(text: &str) -> Option<Excess> {
        match read(text, 50) {
            Err(JsonError::Excess(excess)) => Some(excess),
            Ok(_) | Err(JsonError::Syntax(_)) => None,
        }
    }

    #[test]
    fn what_fits_is_what_serde_reads() {
        let text =
            r#"{"a": [1, -2, 3.5, "x", null, true, {"b": []}], "prompt": [[1, 2], [3]], "big": 18446744073709551615}"#;
        let value = read(text, 50).expect("fits");
        assert_eq!(value, serde_json::from_str::<Value>(text).expect("is JSON"));
        assert!(matches!(read("{", 50), Err(JsonError::Syntax(_))));
        assert!(matches!(read("{} x", 50), Err(JsonError::Syntax(_))));
        let deep = "[".repeat(200) + &"]".repeat(200);
        assert!(matches!(read(&deep, 50), Err(JsonError::Syntax(_))));
    }

    #[test]
    fn reading_ends_where_a_limit_is_passed() {
        let zeros = |count: usize| format!("[{}0]", "0,".repeat(count - 1));
        assert_eq!(excess(&format!(r#"{{"prompt": {}}}"#, zeros(200))), None);
        assert_eq!(
            excess(&format!(r#"{{"prompt": {}}}"#, zeros(201))),
            Some(Excess::Prompt)
        );
        assert_eq!(
            excess(&format!(r#"{{"prompt": [{}]}}"#, zeros(201))),
            Some(Excess::Prompt)
        );
        assert_eq!(
            excess(&format!(r#"{{"tokens": {}}}"#, zeros(JSON_LIST_MAX + 1))),
            Some(Excess::List)
        );
        let lists = vec![zeros(200); 150];
        assert_eq!(excess(&format!(r#"{{"prompt": [{}]}}"#, lists.join(","))), None);
        let many = vec![zeros(JSON_LIST_MAX); 5];
        assert_eq!(
            excess(&format!(r#"{{"x": [{}]}}"#, many.join(","))),
            Some(Excess::Values)
        );
    }
}
