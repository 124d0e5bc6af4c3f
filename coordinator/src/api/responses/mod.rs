//! `/v1/responses`, OpenAI's Responses API, as another form of a chat: its body becomes the messages and fields of a chat, and
//! the answer becomes items. Nothing is stored, so a client sends the whole conversation each time.

mod fields;
mod input;
mod object;
mod reply;

#[cfg(test)]
pub use fields::ResponseFields;
pub use fields::parse;
pub use reply::ResponseReply;
