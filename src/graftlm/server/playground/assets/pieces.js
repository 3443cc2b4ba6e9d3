/**
 * Which tokens a text was made of. Usually a token's text is a piece of the answer; a character may also take several
 * tokens, each of which is no text alone, and some tokens leave no text at all.
 */
export class Pieces {
  #waiting = [];

  /**
   * @param {string} text what is new of the answer
   * @param {Token[]} tokens which are new
   * @returns {{text: string, tokens: Token[]}[]} the text in pieces, each with the tokens that made it
   */
  push(text, tokens) {
    const pieces = [];
    let position = 0;
    for (const token of tokens) {
      const found = token.text === "" ? -1 : text.indexOf(token.text, position);
      // What lies in between is the text of the tokens before.
      if (found < 0 || (found > position && this.#waiting.length === 0)) {
        this.#waiting.push(token);
        continue;
      }
      if (found > position) pieces.push(this.#flush(text.slice(position, found)));
      else this.#waiting = [];
      pieces.push({ text: token.text, tokens: [token] });
      position = found + token.text.length;
    }
    if (position < text.length) pieces.push(this.#flush(text.slice(position)));
    return pieces;
  }

  #flush(text) {
    const tokens = this.#waiting;
    this.#waiting = [];
    return { text, tokens };
  }
}
